"""Whole runs by `umbra up`, whose services are killed, suspended or lose what they need."""

import os
import shutil
import signal
import time
from pathlib import Path

from fakes.slowness import limit
from fakes.whole_runs import Up

from umbra.proto import sockets

STEPS = 40
HUB_STEPS = 90  # so many that it is under way still when its hub is killed again
LEFT = "which an earlier hub of this run had left"


def test_a_run_outlives_its_buffer_and_so_do_its_evaluations(up: Up) -> None:
    steps, samples = 60, 4
    evals = ("eval.every=30", "eval.at_ends=false", "eval.mode=concurrent")
    of_what = ("eval.prompts=prompts.jsonl", f"eval.samples={samples}")
    process = up(f"run.steps={steps}", *evals, *of_what)
    process.broker()
    for _ in range(2):
        process.until_step(len(process.steps()) + 4)
        process.kill("buffer")
    summary = process.finish()
    assert summary["restarts"] == {"buffer": 2}
    assert [row["step"] for row in process.steps()] == list(range(1, steps + 1))
    assert summary["ledger"]["trained"] == steps * 16
    assert not any(summary["ledger"]["in_flight"].values())
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    found = summary["evals"]
    assert [one["version"] // 30 for one in found] == [1, 2]
    assert all(one["answered"] == one["samples"] == samples for one in found), found


def test_a_killed_hub_is_restarted_and_the_run_goes_on(up: Up) -> None:
    """It is killed twice, at whatever it does: no step is lost.

    Both times it is restarted at another port and brought up to date, also while everybody waits
    for its weights (run_ahead = 0).
    """
    process = up(f"run.steps={HUB_STEPS}", "buffer.run_ahead=0")
    process.broker()
    process.until_step(3)
    process.kill("weight-hub")
    process.until(lambda: LEFT in process.log("weight-hub"), "a new hub")
    process.until_step(len(process.steps()) + 5)
    process.kill("weight-hub")
    summary = process.finish()
    assert summary["restarts"] == {"weight-hub": 2}, process.lines
    assert summary["ledger"]["trained"] == HUB_STEPS * 16
    # Each version was served: the generator was never behind. A row may have died with a hub.
    assert summary["staleness"]["max"] == summary["staleness"]["bound"] == 0
    assert summary["mixed_version_trajectories"] == 0
    assert len(set(range(HUB_STEPS)) - {row["version"] for row in process.rows("push")}) <= 3
    assert process.log("weight-hub").count(LEFT) == 2


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
