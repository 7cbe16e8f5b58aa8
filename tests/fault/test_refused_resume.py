"""A run that is to go on with settings that it can't go on with: refused, and on without."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.test_refusals import contents
from integration.test_up import DEADLINE_S, UMBRA, UpProcess, check_drained, up

__all__ = ["up"]  # a fixture

STEPS = 60  # so many that it is under way still when it is stopped, and looked at again


def refused(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """An `umbra up` that ends with a sentence."""
    done = subprocess.run(
        [*UMBRA, "up", *words],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.stderr.splitlines()[-1].startswith("umbra: error: "), done
    return done


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(240)
def test_a_run_goes_on_after_settings_were_refused(
    project: Path, up: Callable[..., UpProcess]
) -> None:
    """1. A run is stopped. 2. Its buffer refuses other sizes. 3. It goes on to its end.

    Result: nothing of what was refused is left; while it goes on, a second start is refused.
    """
    process = up(f"run.steps={STEPS}")
    process.broker()
    process.until(lambda: len(process.steps()) >= 3, "step 3")
    process.popen.send_signal(signal.SIGINT)
    check_drained(process, signal.SIGINT)
    folder = process.run_dir
    before = contents(folder)
    done = refused(project, str(folder), "--set", "buffer.group_size=2")
    assert done.returncode in (2, 4), done
    after = contents(folder)
    for name in ("config.json", "origin.json", "summary.json", "buffer.json"):
        assert after[name] == before[name], name
    popen = subprocess.Popen(
        [*UMBRA, "up", str(folder)],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    again = UpProcess(popen, project)
    try:
        again.broker()
        second = refused(project, str(folder))
        assert second.returncode == 2
        assert f"is under way, started by process {popen.pid}: watch it" in second.stderr
        summary = again.finish()
    finally:
        popen.kill()
        popen.communicate()
    assert popen.returncode == 0, again.lines
    ledger = summary["ledger"]
    assert (ledger["trained"], ledger["balance"]) == (STEPS * 16, 0)
