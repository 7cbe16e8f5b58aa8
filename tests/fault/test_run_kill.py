"""Whole runs by `umbra up`, in which services are suspended or lose what they need."""

import os
import shutil
import signal
import time
from pathlib import Path

from fakes.slowness import limit
from fakes.whole_runs import Up

from umbra.proto import sockets

STEPS = 40


def test_a_run_outlives_a_stop_of_its_processes(up: Up) -> None:
    """As by `docker pause` or a virtual machine that is suspended: nothing ends, nothing is lost.

    Longer than the kernel waits for an acknowledgement, and than a member may be silent.
    """
    process = up(f"run.steps={5 * STEPS}")
    process.broker()
    for services in (("buffer", "weight-hub"), ("trainer", "generator")):
        process.until_step(len(process.steps()) + 5)
        pids = [process.pid(service) for service in services]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(sockets.UNACKNOWLEDGED_MS / 1000 + 5)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    summary = process.finish()
    assert summary["restarts"] == {}
    assert summary["ledger"]["trained"] == 5 * STEPS * 16


def test_a_run_outlives_the_removal_of_its_shared_memory(up: Up) -> None:
    """As by a cleaner of /dev/shm: the hub makes it again, and a new generator finds it."""
    process = up(f"run.steps={STEPS}")
    process.broker()
    process.until_step(5)
    removed = list(Path("/dev/shm").glob(f"umbra-{process.run_dir.name}*"))
    assert removed
    for path in removed:
        path.unlink()
    process.until(lambda: "was removed" in process.log("weight-hub"), "the hub's last words")
    process.kill("generator")
    summary = process.finish()
    assert summary["restarts"] == {"weight-hub": 1, "generator-0": 1}
    assert summary["ledger"]["trained"] == STEPS * 16


def test_a_run_whose_folder_is_removed_ends_with_a_sentence(up: Up) -> None:
    process = up("run.steps=100000")
    process.broker()
    process.until_step(5)
    shutil.rmtree(process.run_dir, ignore_errors=True)
    _, error = process.popen.communicate(timeout=limit(60))
    assert process.popen.returncode == 6
    assert "was removed under way" in error
    assert "Traceback" not in error
