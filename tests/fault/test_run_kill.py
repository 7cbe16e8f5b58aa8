"""Whole runs by `umbra up`, in which services are killed or suspended on the way.

Kills by `make test-real`: `test_demo_kill.py` sees the same, and more, of the demo.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.slowness import seconds
from integration.test_up import UpProcess, up

from umbra.proto import sockets

__all__ = ["up"]  # a fixture

STEPS = 40


def kill(process: UpProcess, service: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to one of the run's processes."""
    config = bytes(process.run_dir / "config.json")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):  # it ended just now
            continue
        if config in words and service.encode() in words:
            os.kill(int(path.parent.name), number)
            return
    raise AssertionError(f"no {service} is running")


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.real
@pytest.mark.timeout(180)
def test_a_run_outlives_its_buffer(up: Callable[..., UpProcess]) -> None:
    process = up(f"run.steps={STEPS}")
    process.broker()
    for killed_at in (5, 15):
        process.until(lambda at=killed_at: len(process.steps()) >= at, f"step {killed_at}")
        kill(process, "buffer")
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {"buffer": 2}
    assert [row["step"] for row in process.steps()] == list(range(1, STEPS + 1))
    ledger = summary["ledger"]
    assert (ledger["trained"], ledger["balance"]) == (STEPS * 16, 0)


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.real
@pytest.mark.timeout(180)
def test_a_trainer_that_starts_again_gets_the_same_batches(up: Callable[..., UpProcess]) -> None:
    """It has no checkpoint, so it begins at step 1 again; what it learns from is the same."""
    process = up(f"run.steps={STEPS}", "checkpoint.every=0")
    process.broker()
    process.until(lambda: len(process.steps()) >= 10, "step 10")
    kill(process, "trainer")
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {"trainer": 1}
    seen: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in process.steps():
        seen[row["step"]].append((row["reward/mean"], row["tokens"]))
    assert list(seen) == list(range(1, STEPS + 1))
    repeated = [values for values in seen.values() if len(values) == 2]
    assert len(repeated) >= 10
    assert all(first == second for first, second in repeated)
    ledger = summary["ledger"]
    assert (ledger["trained"], ledger["balance"]) == (STEPS * 16, 0)
    assert summary["steps"] == STEPS


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(180)
@pytest.mark.parametrize("services", [("buffer", "weight-hub"), ("trainer", "generator")])
def test_a_run_outlives_a_stop_of_its_processes(
    up: Callable[..., UpProcess], services: tuple[str, ...]
) -> None:
    """As by `docker pause` or a virtual machine that is suspended: nothing ends, nothing is lost.

    Longer than the kernel waits for an acknowledgement, and than a member may be silent.
    """
    process = up(f"run.steps={STEPS}")
    process.broker()
    process.until(lambda: len(process.steps()) >= 5, "step 5")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for service in services:
            kill(process, service, number)
        if number == signal.SIGSTOP:
            time.sleep(sockets.UNACKNOWLEDGED_MS / 1000 + 5)
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {}
    ledger = summary["ledger"]
    assert (ledger["trained"], ledger["balance"]) == (STEPS * 16, 0)


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.real
@pytest.mark.timeout(240)
@pytest.mark.parametrize("service", ["trainer", "weight-hub"])
def test_a_second_process_of_a_name_is_refused_and_the_run_goes_on(
    up: Callable[..., UpProcess], service: str
) -> None:
    process = up("run.steps=100000")
    broker = process.broker()
    process.until(lambda: len(process.steps()) >= 5, "step 5")
    config = process.run_dir / "config.json"
    words = ["--broker", broker, "--config", config, "--run-dir", process.project / "second"]
    second = subprocess.run(
        [sys.executable, "-m", "umbra", service, *words],
        cwd=process.project,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert second.returncode == 4, second.stderr
    assert "stop it, or give this one another --name" in second.stderr
    reached = len(process.steps())
    process.until(lambda: len(process.steps()) > reached + 5, "five steps more")
    process.popen.send_signal(signal.SIGTERM)
    assert process.finish()["restarts"] == {}


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(180)
def test_a_run_outlives_the_removal_of_its_shared_memory(up: Callable[..., UpProcess]) -> None:
    """As by a cleaner of /dev/shm: the hub makes it again, and a new generator finds it."""
    process = up(f"run.steps={STEPS}")
    process.broker()
    process.until(lambda: len(process.steps()) >= 5, "step 5")
    removed = list(Path("/dev/shm").glob(f"umbra-{process.run_dir.name}*"))
    assert removed
    for path in removed:
        path.unlink()
    process.until(lambda: "was removed" in log_of(process, "weight-hub"), "the hub's last words")
    kill(process, "generator")
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {"weight-hub": 1, "generator-0": 1}
    ledger = summary["ledger"]
    assert (ledger["trained"], ledger["balance"]) == (STEPS * 16, 0)


def log_of(process: UpProcess, service: str) -> str:
    return (process.run_dir / "logs" / f"{service}.log").read_text()


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(120)
def test_a_run_whose_folder_is_removed_ends_with_a_sentence(up: Callable[..., UpProcess]) -> None:
    process = up("run.steps=100000")
    process.broker()
    process.until(lambda: len(process.steps()) >= 5, "step 5")
    shutil.rmtree(process.run_dir, ignore_errors=True)
    _, error = process.popen.communicate(timeout=seconds(60))
    assert process.popen.returncode == 6
    assert "was removed under way" in error
    assert "Traceback" not in error
