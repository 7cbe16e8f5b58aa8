"""Computations of the benchmarks: grids, simulations, audits; figures of the documents."""

import importlib
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fakes.serving import FakeChannel
from fakes.trajectories import trajectory

from umbra.proto.messages import SubmitResults, TaskLeases

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
# vllm_models.json has a form of its own; test_architectures.py compares it with docs/models.md.
PUBLISHED = [file for file in RESULTS if file.stem != "vllm_models"]
ANSWER = trajectory([1, 2], [3, 4, 5], [-1.0, -2.0, -3.0], sample_id="a", reward=0.5)


pytestmark = pytest.mark.usefixtures("benchmarks_importable")


def test_documents_and_plots_are_what_the_results_give() -> None:
    outdated = importlib.import_module("figures").outdated()
    assert [str(path.relative_to(ROOT)) for path in outdated] == [], "run: make figures"


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_figures_follow_from_the_rows(file: Path) -> None:
    report = importlib.import_module("report").Report.read(file)
    content = json.loads(file.read_text(encoding="utf-8"))
    script = Path(content["command"].split()[1]).stem
    report.restate(importlib.import_module(script).summarise)
    assert content["rows"] and content["commit"] and content["date"] and content["hardware"]
    assert json.loads(json.dumps(report.tables)) == content["tables"]
    assert report.figures == pytest.approx(content["figures"])
    assert [(g["name"], g["met"]) for g in report.goals] == [
        (g["name"], g["met"]) for g in content["goals"]
    ]


def test_a_simulated_run_is_balanced_and_asynchrony_pays() -> None:
    from scale import MODES, Simulation

    from umbra.services.buffer.broker import Broker

    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        simulation = Simulation(mode, generators=4, steps=6)
        assert type(simulation.broker.broker) is Broker  # production's, in simulated time
        found[mode.name] = row = simulation.run()
        assert row["balance"] == 0 and row["trained"] == 6 * 4 * 8, mode
        assert row["staleness_max"] <= mode.max_staleness
        assert 0 < row["slots"] <= 1 and 0 < row["trains"] < 1
    turns, _, one_off, ahead = (row["samples_per_s"] for row in found.values())
    assert ahead > one_off > turns


def test_an_audit_counts_every_sample_by_the_records_of_clients(tmp_path: Path) -> None:
    """f, g and h were not trained: a rule covers one, nobody two, whatever the ledger says."""
    import chaos_audit

    ledger = {"issued": 8, "trained": 5, "ended": {"stale": 1, "failed": 1}, "in_flight": {}}
    (tmp_path / "buffer.json").write_text(json.dumps({"ledger": ledger}))
    (tmp_path / "acknowledged-1.txt").write_text("a\nb\nc\nd\n")
    (tmp_path / "acknowledged-2.txt").write_text("e\nf\ng\nh\n")
    batches = ((1, "a x"), (1, "a b"), (1, "a b"), (2, "c d"), (3, "d e"))
    rows = [{"step": step, "samples": names.split()} for step, names in batches]
    (tmp_path / "trained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = chaos_audit.audit(tmp_path, tmp_path)
    assert (found.acknowledged, found.trained, found.untrained) == (8, 5, 3)
    assert (found.lost, found.twice, found.repeated, found.changed) == (2, 1, 2, 1)
    assert found.steps == [1, 2, 3]


def test_clients_record_what_was_acknowledged_and_trained_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import chaos_audit

    monkeypatch.setenv(chaos_audit.VARIABLE, str(tmp_path))
    channel: Any = FakeChannel()
    client = chaos_audit.noting_client()(channel, threading.Event())
    client.submit([msgspec.structs.replace(ANSWER, sample_id=name) for name in ("a", "b")])
    client.wait(0.0)
    client.poll()
    assert list(tmp_path.iterdir()) == []
    channel.answer(SubmitResults, TaskLeases(accepted=1, refused={"b": "stale"}))
    client.poll()
    (file,) = tmp_path.iterdir()
    assert file.read_text() == "a\n"
    rows: list[Any] = [None, {"loss": 0.0}]  # the first is broken off
    update = chaos_audit.noting(lambda *given: rows.pop(0))
    for _ in range(2):
        update(SimpleNamespace(trajectories=[ANSWER]), 4, lambda: True)
    (line,) = (tmp_path / "trained.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 5, "samples": [ANSWER.sample_id]}


SESSION = ROOT / "benchmarks" / "gpu_session.sh"


def test_the_steps_of_a_gpu_session_begin_fit_into_seven_calls_and_hold_every_test_on_gpus(
    tmp_path: Path,
) -> None:
    own = {"OUT": str(tmp_path), "WHEELS": str(tmp_path / "none"), "PYTHON": sys.executable}
    dry, listed, unknown = (
        subprocess.run(
            [SESSION, *words],
            env=os.environ | own, capture_output=True, text=True, check=False,
        )
        for words in (["--dry-run"], [], ["8"])
    )  # fmt: skip
    assert dry.returncode == 0, dry
    assert "16 steps would begin\n" in dry.stdout
    limits = [int(found) for found in re.findall(r"call \d, at most (\d+) s", listed.stdout)]
    assert len(limits) == 7
    assert all(0 < limit < 600 for limit in limits)
    assert unknown.returncode == 2 and "there is no step 8" in unknown.stdout + unknown.stderr
    text = SESSION.read_text(encoding="utf-8")
    for file in (SESSION.parents[1] / "tests" / "gpu").glob("test_*.py"):
        assert file.name in text
