"""The GPU session, where there is no GPU: each step would begin, and calls have all of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

SESSION = Path(__file__).parents[2] / "benchmarks" / "gpu_session.sh"


def test_the_steps_begin_fit_into_seven_calls_and_hold_every_test_on_gpus(tmp_path: Path) -> None:
    own = {"OUT": str(tmp_path), "WHEELS": str(tmp_path / "none"), "PYTHON": sys.executable}
    dry, listed, unknown = (
        subprocess.run(
            [SESSION, *words],
            env=os.environ | own, capture_output=True, text=True, check=False,
        )
        for words in (["--dry-run"], [], ["8"])
    )  # fmt: skip
    assert dry.returncode == 0, dry
    assert "19 steps would begin\n" in dry.stdout
    limits = [int(found) for found in re.findall(r"call \d, at most (\d+) s", listed.stdout)]
    assert len(limits) == 7
    assert all(0 < limit < 600 for limit in limits)
    assert unknown.returncode == 2 and "there is no step 8" in unknown.stdout + unknown.stderr
    text = SESSION.read_text(encoding="utf-8")
    for file in (SESSION.parents[1] / "tests" / "gpu").glob("test_*.py"):
        assert file.name in text
