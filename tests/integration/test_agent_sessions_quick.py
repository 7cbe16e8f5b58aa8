"""The quick form of `benchmarks/agent_sessions.py`: whole sessions, a worker killed, none lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.slowness import seconds

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "agent_sessions.py"


@pytest.mark.e2e
@pytest.mark.real  # in the suite: a run whose env-workers are killed (test_env_worker_kill.py)
@pytest.mark.timeout(300)
def test_no_session_is_lost_with_a_worker(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json", str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=seconds(240.0),
        check=False,
    )
    assert file.exists(), ended.stdout + ended.stderr
    content = json.loads(file.read_bytes())
    (outcome,) = (row for row in content["rows"] if row["part"] == "run")
    assert outcome["trained"] == outcome["load"]["sessions"] * outcome["load"]["waves"] == 96
    assert (outcome["balance"], outcome["ended"], outcome["killed"]) == (0, {}, 1)
    assert 0 < outcome["full"] <= 1.01
