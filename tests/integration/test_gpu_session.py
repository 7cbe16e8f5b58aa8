"""The GPU session, where there is no GPU: each step would begin, and none passes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SESSION = Path(__file__).parents[2] / "benchmarks" / "gpu_session.sh"


def gpu_session(out: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code and output of the session, with our own interpreter."""
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would begin in earnest")
def test_steps_that_nothing_was_seen_of_have_not_passed(tmp_path: Path) -> None:
    """1. No GPU, or tests that are skipped for want of one. 2. No time left."""
    _code, said = gpu_session(tmp_path, SECONDS_IN_ALL="20", WHEELS="/nowhere")
    rows = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert "passed" not in {row["state"] for row in rows}, said
    code, said = gpu_session(tmp_path, SECONDS_IN_ALL="0", WHEELS="/nowhere")
    assert (code, said.count("not begun")) == (1, len(rows))
    assert gpu_session(tmp_path, "--dry")[0] == 2
