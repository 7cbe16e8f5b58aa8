"""The GPU session, where there is no GPU: each step would begin, and none passes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SESSION = Path(__file__).parents[2] / "benchmarks" / "gpu_session.sh"


def gpu_session(out: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(SESSION), *arguments],
        env={**os.environ, "OUT": str(out), "PYTHON": sys.executable, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.real  # it imports torch in a dozen processes; the next one runs the session itself
def test_each_step_of_the_gpu_session_would_begin(tmp_path: Path) -> None:
    code, said = gpu_session(tmp_path, "--dry-run")
    assert code == 0, said
    assert said.count("passed") == len(said.splitlines()) > 5
