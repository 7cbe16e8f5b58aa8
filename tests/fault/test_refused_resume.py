"""A run that is to go on with settings that it can't go on with: refused, and on without."""

import signal
import subprocess
from pathlib import Path

from fakes.commands import call
from fakes.whole_runs import UMBRA, Up
from integration.test_refusals import contents

STEPS = 60  # so many that it is under way still when it is stopped, and looked at again


def refused(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """An `umbra up` that ends with a sentence."""
    done = call([*UMBRA, "up", *words], cwd=project)
    assert done.stderr.splitlines()[-1].startswith("umbra: error: "), done
    return done


def test_a_run_goes_on_after_settings_were_refused(project: Path, up: Up) -> None:
    """1. A run is stopped. 2. Its buffer refuses other sizes. 3. It goes on to its end.

    Result: nothing of what was refused is left; while it goes on, a second start is refused.
    """
    process = up(f"run.steps={STEPS}")
    process.broker()
    process.until_step(3)
    process.popen.send_signal(signal.SIGINT)
    summary = process.finish(128 + signal.SIGINT)
    assert (summary["exit_reason"], summary["model"]) == ("interrupted", None)
    assert not [line for line in process.lines if "killed" in line]
    folder = process.run_dir
    before = contents(folder)
    done = refused(project, str(folder), "--set", "buffer.group_size=2")
    assert done.returncode in (2, 4), done
    after = contents(folder)
    for name in ("config.json", "origin.json", "summary.json", "buffer.json"):
        assert after[name] == before[name], name
    again = up(run=folder)
    again.broker()
    second = refused(project, str(folder))
    assert second.returncode == 2
    assert f"is under way, started by process {again.popen.pid}: watch it" in second.stderr
    summary = again.finish()
    assert summary["ledger"]["trained"] == STEPS * 16
