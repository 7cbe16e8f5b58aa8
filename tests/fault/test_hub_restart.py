"""The weight hub is killed in the middle of a real run: it is restarted, and the run ends well."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from integration.test_up import DEADLINE_S, UpProcess, up  # noqa: F401 - a fixture, and its type

from umbra.services.monitor.client import StatusClient

STEPS = 60  # so many that it is under way still when its hub is killed again


def pid_of(broker: str, name: str) -> int:
    """The process id of a member of the run."""
    with StatusClient(broker) as client:
        return next(m.pid for m in client.status(DEADLINE_S).members if m.name == name)


def pushes(process: UpProcess) -> list[dict[str, Any]]:
    """The hub's row of every push, over all its lives."""
    lines = (process.run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "push"]


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(180)
def test_a_killed_hub_is_restarted_and_the_run_goes_on(
    up: Callable[..., UpProcess],  # noqa: F811
) -> None:
    """1. A run trains. 2. Its hub is killed, at whatever it does. 3. Again, some steps later.

    Result: both times it is restarted at another port and brought up to date, also while everybody
    waits for its weights (run_ahead = 0); no step is lost.
    """
    process = up(f"run.steps={STEPS}", "buffer.run_ahead=0")
    broker = process.broker()
    for step in (3, 15):
        process.until(lambda step=step: len(process.steps()) >= step, f"step {step}")
        os.kill(pid_of(broker, "weight-hub"), signal.SIGKILL)
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {"weight-hub": 2}, process.lines
    assert summary["steps"] == STEPS
    assert summary["ledger"]["trained"] == STEPS * 16
    assert summary["ledger"]["balance"] == 0
    # Each version was served: the generator was never behind. A row may have died with a hub.
    assert summary["staleness"]["max"] == summary["staleness"]["bound"] == 0
    assert {row["staleness/total/max"] for row in process.steps()} == {0.0}
    assert summary["mixed_version_trajectories"] == 0
    assert len(set(range(STEPS)) - {row["version"] for row in pushes(process)}) <= 3
    log = (process.run_dir / "logs" / "weight-hub.log").read_text()
    assert log.count("took over /dev/shm/") == 2, log
