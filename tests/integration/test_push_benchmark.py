"""The benchmark of weight pushes runs: its processes start, push and end."""

import importlib
import json
import multiprocessing
import sys
from pathlib import Path

import pytest


@pytest.mark.usefixtures("benchmarks_importable")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_toy_pushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are forks of this one: those that it starts itself import torch for seconds."""
    weight_push, roles = map(importlib.import_module, ("weight_push", "weight_roles"))
    monkeypatch.setattr("report.OTHERS_MOST", 1.0)  # other tests compute beside it
    monkeypatch.setattr(roles, "_context", multiprocessing.get_context("fork"))
    file = tmp_path / "found.json"
    words = ["--quick", "--json", str(file), "--only", "`shm`", "`tcp`, all"]
    monkeypatch.setattr(sys, "argv", ["weight_push.py", *words])
    assert weight_push.main() == 0
    found = json.loads(file.read_text())
    rows = [(row["method"].split()[0], row["receivers"]) for row in found["rows"]]
    assert rows == [("`shm`", 1), ("`tcp`,", 1)]
    shm, tcp = found["rows"]
    assert shm["load_floor_s"] > 0 and tcp["load_floor_s"] > 0
    assert tcp["wire_bytes"] >= tcp["nbytes"]  # no bucket was skipped as unchanged
    assert found["tables"]["pushes"]["rows"]
