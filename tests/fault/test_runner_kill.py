"""A whole run whose agents are in a runner, which is killed again and again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.slowness import limit, seconds
from fakes.whole_runs import Up

AGENT = """
import asyncio
from umbra.services.environments.agent_program import request

def note(sign):
    with open("work.log", "a") as file:
        file.write(sign)

async def solve(row, endpoint, tries=3):
    note("+")
    messages = [{"role": "user", "content": row["prompt"]}]
    url = endpoint["base_url"] + "/chat/completions"
    for turn in range(tries):
        status, said = await request(url, endpoint["api_key"], {"messages": messages})
        if status != 200:
            break  # the last answer was cut off
        await asyncio.sleep(0.2)  # a tool
        messages += [said["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
    note("-")
    return len(messages) + 0.01 * len(str(messages))
"""
ENVIRONMENT = """
[[environments]]
name = "{name}"
kind = "agent"
agent = "tiny_agent:solve"
workers = 0
timeout_s = {timeout_s}
prompts = "prompts.jsonl"
options = {{ tries = {tries} }}
"""
ENVIRONMENTS = "".join(
    ENVIRONMENT.format(name=f"of-{n}", tries=n, timeout_s=limit(60.0)) for n in (2, 3)
)
# Leases of a killed runner end soon enough for a test.
RUNNER = (
    "from umbra.deploy.commands import run_agents; from umbra.services.environments import runner; "
    "runner.LEASE_S = {lease_s}; run_agents.command()"
)


def said_by_generator(run_dir: Path) -> str:
    logs = [path.read_text() for path in run_dir.rglob("*generator-0*") if path.is_file()]
    return "".join(logs)


def endpoints(run_dir: Path) -> set[str]:
    return set(re.findall(r"agents are served at (http://\S+)", said_by_generator(run_dir)))


@pytest.mark.timeout(300)
def test_a_run_outlives_its_runners(project: Path, up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "tiny_agent.py").write_text(AGENT)
    run = (project / "run.toml").read_text()
    run = run.replace('[environment]\nkind = "reward"\nreward = "tiny_reward:score"\n', "")
    run = run.replace('[data]\nprompts = "prompts.jsonl"\n', "") + ENVIRONMENTS
    run = run.replace("max_tokens = 12", f"max_tokens = 24\nstop_tokens = {list('abcdefghijklmn')}")
    run = run.replace("max_context = 64", "max_context = 512")
    run = run.replace("[generator]\n", '[generator]\nserve = "127.0.0.1:0"\n')
    (project / "run.toml").write_text(run)
    monkeypatch.setenv("UMBRA_AGENT_KEY", "of the runners")
    process = up(quiet_s=200.0)
    process.broker()
    process.until(lambda: len(endpoints(process.run_dir)) == 2, "two endpoints")
    urls = [part for url in endpoints(process.run_dir) for part in ("--generator", url)]

    def start() -> subprocess.Popen[bytes]:
        code = RUNNER.format(lease_s=seconds(3.0))
        return subprocess.Popen(
            [sys.executable, "-c", code, "--config", "run.toml", "--workers", "1", *urls],
            cwd=project,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def at_work() -> int:
        """Agents that have begun and not ended, those that were killed included."""
        log = project / "work.log"
        noted = log.read_text() if log.exists() else ""
        return noted.count("+") - noted.count("-")

    runner, lost = start(), 0
    try:
        for killed_at in (1, 2):
            process.until(
                lambda at=killed_at, lost=lost: len(process.steps()) >= at and at_work() > lost,
                f"step {killed_at}, and an agent at work",
            )
            runner.kill()
            runner.wait()
            lost = at_work()
            runner = start()
        summary = process.finish()
    finally:
        runner.kill()
        runner.wait()
    assert summary["ledger"]["trained"] == 64
    assert "failed" not in summary["ledger"]["ended"]
    assert not sum(summary["restarts"].values()), summary["restarts"]
    assert "its agent is lost" in said_by_generator(process.run_dir)
    for name in ("of-2", "of-3"):
        assert any(row.get(f"environment/{name}/samples") for row in process.steps()), name
