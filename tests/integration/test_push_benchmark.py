"""The benchmark of weight pushes runs: its processes start, push and end."""

import json
import subprocess
import sys
from pathlib import Path

from fakes.slowness import limit

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "weight_push.py"


def test_toy_pushes_by_us_and_by_gloo(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--quick", "--json", str(file)),
            *("--only", "`shm`", "`tcp`, all", "gloo"),
        ],
        check=True,
        timeout=limit(120),
    )
    found = json.loads(file.read_text())
    rows = [(row["method"].split()[0], row["receivers"]) for row in found["rows"]]
    assert rows == [("`shm`", 1), ("`tcp`,", 1), ("gloo", 1)]
    shm, tcp, gloo = found["rows"]
    assert shm["load_floor_s"] > 0 and tcp["load_floor_s"] > 0 and gloo["load_floor_s"] is None
    assert tcp["wire_bytes"] >= tcp["nbytes"]  # no bucket was skipped as unchanged
    assert found["tables"]["pushes"]["rows"]
