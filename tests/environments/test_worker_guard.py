"""Processes of a reward end with the run, and its output has a limit, however it ends."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.fixtures import Closes
from fakes.players import Player
from fakes.slowness import is_alive, seconds, until

from umbra.services.config import EnvironmentConfig
from umbra.services.environments import guard
from umbra.services.environments.pool import ProcessPool

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

USER_CODE = """
import os, subprocess, sys, time

def score(prompt, completion, row):
    for session in (False, True):
        child = subprocess.Popen(["sleep", "600"], start_new_session=session)
        with open("pids", "a") as file:
            file.write(f"{child.pid}\\n")
    # Its parent is gone at once.
    subprocess.run(["sh", "-c", "setsid sleep 600 & echo $! >> pids"], check=True)
    if completion == "hang":
        time.sleep(600)
    if completion == "die":
        os.kill(os.getpid(), 9)
    return 1.0

def talkative(prompt, completion, row):
    for _ in range(500):
        os.write(1, b"x" * 100_000)
    print("the end")
    return 1.0

def hungry(prompt, completion, row):
    if completion == "much":
        return float(len(bytearray(400 << 20)))
    return float(len(bytearray(50 << 20)) > 0)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "starter.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(reward: str, **keys: Any) -> EnvironmentConfig:
    return EnvironmentConfig(kind="reward", reward=f"starter:{reward}", workers=1, **keys)


def started(project: Path, count: int) -> list[int]:
    path = project / "pids"
    until(lambda: path.exists() and path.read_text().count("\n") == count, "nothing was started")
    return [int(line) for line in path.read_text().split()]


@pytest.mark.parametrize("how", ["fine", "hang", "die"])
def test_what_a_reward_starts_ends_with_it(project: Path, how: str) -> None:
    pool = ProcessPool(config("score", timeout_s=seconds(2.0)))
    try:
        pool.play("a", {"prompt": "p"}, [how])
        pids = started(project, 3)
        if how != "fine":  # its process is ended, and the pool goes on
            until(lambda: not any(map(is_alive, pids)), "they outlive their worker")
    finally:
        pool.close()
    until(lambda: not any(map(is_alive, pids)), "they outlive the pool")


OWNER = """
import sys, time
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.pool import ProcessPool

config = EnvironmentConfig(kind="reward", reward=sys.argv[1], workers=1, timeout_s=600.0)
pool = ProcessPool(config)
pool.play("a", {"prompt": "p"}, ["hang"])
while not (found := pool.collect()):
    time.sleep(0.01)
print(found[0].value.reward, flush=True)
pool.close()
"""


def owner(project: Path, reward: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", OWNER, reward]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_it_ends_with_an_owner_that_is_killed(project: Path) -> None:
    process = owner(project, "starter:score")
    pids = started(project, 3)
    process.kill()
    process.communicate()
    until(lambda: not any(map(is_alive, pids)), "they outlive the process that started the worker")


def test_its_output_has_a_limit(project: Path) -> None:
    out, err = owner(project, "starter:talkative").communicate(timeout=seconds(60.0))
    assert out == b"1.0\n"
    assert len(err) < 2 * guard.BURST_BYTES
    assert b"more output of an environment than its limit allows" in err


@pytest.mark.usefixtures("project")
def test_its_memory_is_limited_beyond_what_the_process_has(closes: Closes) -> None:
    """Python itself has more address space than this limit."""
    player = closes(Player(config("hungry", memory_mb=100)))
    for name in ("much", "little"):
        player.pool.play(name, {"prompt": "p"}, [name])
    outcomes: dict[str, Any] = player.outcomes(2)
    assert outcomes["little"].value.reward == 1.0
    assert "took more than environment.memory_mb = 100; raise it" in outcomes["much"].error
