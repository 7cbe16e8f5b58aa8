"""Programs that a test runs to their end."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fakes.slowness import limit

UMBRA = (sys.executable, "-m", "umbra")


def call(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    quiet_s: float = 60.0,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program with our modules in its path; return what it printed and its exit code."""
    return subprocess.run(
        argv,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})},
        capture_output=True,
        text=True,
        timeout=limit(quiet_s),
        check=check,
        **options,
    )
