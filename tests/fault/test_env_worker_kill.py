"""A whole run whose two environments are on env-workers, which are killed again and again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.slowness import seconds
from fault.test_run_kill import kill
from integration.test_up import UpProcess, up

__all__ = ["up"]  # a fixture

AGENT = """
import asyncio, json, urllib.error, urllib.request

def post(endpoint, messages):
    headers = {"content-type": "application/json",
               "authorization": "Bearer " + endpoint["api_key"]}
    url = endpoint["base_url"] + "/chat/completions"
    body = json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        return json.load(answer)

async def solve(row, endpoint, tries=3):
    messages = [{"role": "user", "content": row["prompt"]}]
    for turn in range(tries):
        try:
            said = await asyncio.to_thread(post, endpoint, messages)
        except urllib.error.HTTPError as error:
            error.close()
            break  # the last answer was cut off
        await asyncio.sleep(0.2)  # a tool
        messages += [said["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
    return len(messages) + 0.01 * len(str(messages))
"""


ENVIRONMENT = """
[[environments]]
name = "{name}"
kind = "agent"
agent = "tiny_agent:solve"
workers = 1
run_on = "env_worker"
prompts = "prompts.jsonl"
options = {{ tries = {tries} }}
"""
ENVIRONMENTS = "".join(ENVIRONMENT.format(name=f"of-{n}", tries=n) for n in (2, 3))


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_a_run_outlives_its_env_workers(project: Path, up: Callable[..., UpProcess]) -> None:
    (project / "tiny_agent.py").write_text(AGENT)
    run = (project / "run.toml").read_text()
    run = run.replace('[environment]\nkind = "reward"\nreward = "tiny_reward:score"\n', "")
    run = run.replace('[data]\nprompts = "prompts.jsonl"\n', "") + ENVIRONMENTS
    run = run.replace("max_tokens = 12", f"max_tokens = 24\nstop_tokens = {list('abcdefghijklmn')}")
    run = run.replace("max_context = 64", "max_context = 512")
    (project / "run.toml").write_text(run)
    process = up("env_worker.count=2", "buffer.max_attempts=9", flags=("--no-eval",))
    process.broker()
    for killed_at in (1, 2):
        process.until(lambda at=killed_at: len(process.steps()) >= at, f"step {killed_at}")
        kill(process, "env-worker")
    summary = process.finish(seconds(200))
    assert process.popen.returncode == 0, process.lines
    assert summary["ledger"]["trained"] == 64 and summary["ledger"]["balance"] == 0
    status = json.loads((process.run_dir / "buffer.json").read_text())
    assert status["counters"]["sessions_lost"] >= 1
    assert "failed" not in summary["ledger"]["ended"]
    assert sum(summary["restarts"].values()) == 2, summary["restarts"]
    for name in ("of-2", "of-3"):
        assert any(row.get(f"environment/{name}/samples") for row in process.steps()), name
