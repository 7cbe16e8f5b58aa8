"""Programs that a test runs to their end."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fakes.forks import SEARCH, Popen
from fakes.slowness import limit

UMBRA = (sys.executable, "-m", "umbra")


def call(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    quiet_s: float = 60.0,
    check: bool = False,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program with our modules in its path; return what it printed and its exit code."""
    with Popen(
        argv,
        env={**os.environ, "PYTHONPATH": SEARCH, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit(quiet_s))
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(argv, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
