"""The GPU session, where there is no GPU: each step would begin, and none passes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

SESSION = Path(__file__).parents[2] / "benchmarks" / "gpu_session.sh"


def gpu_session(out: Path, *arguments: str) -> tuple[int, str]:
    own = {"OUT": str(out), "WHEELS": str(out / "none"), "PYTHON": sys.executable}
    done = subprocess.run(
        [str(SESSION), *arguments],
        env=os.environ | own, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_each_step_of_the_gpu_session_would_begin(tmp_path: Path) -> None:
    code, said = gpu_session(tmp_path, "--dry-run")
    assert code == 0, said
    assert "19 steps would begin\n" in said


def test_the_steps_fit_into_seven_calls_and_hold_every_test_on_gpus(tmp_path: Path) -> None:
    code, said = gpu_session(tmp_path)
    limits = [int(found) for found in re.findall(r"call \d, at most (\d+) s", said)]
    assert code == 0
    assert len(limits) == 7
    assert all(0 < limit < 600 for limit in limits)
    text = SESSION.read_text(encoding="utf-8")
    for file in (SESSION.parents[1] / "tests" / "gpu").glob("test_*.py"):
        assert file.name in text
    code, said = gpu_session(tmp_path, "8")
    assert code == 2
    assert "there is no step 8" in said


def test_a_step_has_a_summary_of_its_own(tmp_path: Path) -> None:
    code, said = gpu_session(tmp_path, "facts", "experts")
    assert code == 1, said
    facts = json.loads((tmp_path / "facts" / "summary.json").read_text())
    assert facts["state"] == "passed"
    assert "Nothing to do" in (log := (tmp_path / "facts" / "log.txt").read_text()) or "What" in log
    experts = json.loads((tmp_path / "experts" / "summary.json").read_text())
    assert experts["state"] != "passed"
    assert experts["tests"] > 0
