"""A whole run whose two environments are on env-workers, which are killed again and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from fakes.fixtures import UMBRA
from fakes.slowness import seconds
from fakes.waiting import until

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
def test_a_run_outlives_its_env_workers(project: Path) -> None:
    (project / "tiny_agent.py").write_text(AGENT)
    run = (project / "run.toml").read_text()
    run = run.replace('[environment]\nkind = "reward"\nreward = "tiny_reward:score"\n', "")
    run = run.replace('[data]\nprompts = "prompts.jsonl"\n', "") + ENVIRONMENTS
    run = run.replace("max_tokens = 12", f"max_tokens = 24\nstop_tokens = {list('abcdefghijklmn')}")
    run = run.replace("max_context = 64", "max_context = 512")
    (project / "run.toml").write_text(run)
    overrides = [
        "--set",
        "run.steps=4",
        "--set",
        "env_worker.count=2",
        "--set",
        "buffer.max_attempts=9",
    ]
    up = subprocess.Popen(
        [*UMBRA, "up", "run.toml", "--no-eval", "--json", *overrides],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        killed = 0
        for steps in (1, 2):
            until(lambda steps=steps: up.poll() is not None or committed(project) >= steps, "steps")
            for pid in workers_of(up.pid):
                os.kill(pid, signal.SIGKILL)
                killed += 1
                break
        out, err = up.communicate(timeout=seconds(200))
    finally:
        up.kill()
        up.communicate()
    assert up.returncode == 0, err
    assert killed == 2
    summary = json.loads(out)
    assert summary["ledger"]["trained"] == 64 and summary["ledger"]["balance"] == 0
    (folder,) = (project / "runs").iterdir()
    status = json.loads((folder / "buffer.json").read_text())
    assert status["counters"]["sessions_lost"] >= 1
    assert "failed" not in summary["ledger"]["ended"]
    assert sum(summary["restarts"].values()) == 2, summary["restarts"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    for name in ("of-2", "of-3"):
        assert any(row.get(f"environment/{name}/samples") for row in steps), name


def committed(project: Path) -> int:
    """Steps of the run so far."""
    return sum(
        '"kind":"step"' in row.replace(" ", "")
        for path in project.glob("runs/*/metrics.jsonl")
        for row in path.read_text().splitlines()
    )


def workers_of(parent: int) -> list[int]:
    """Processes of env-workers that the run has started."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            own = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent
        except OSError:
            continue
        if own and b"env-worker" in words:
            found.append(int(path.name))
    return found
