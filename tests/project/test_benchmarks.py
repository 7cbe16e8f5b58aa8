"""Computations of the benchmarks: times to an accuracy, grids, audits; figures of the documents."""

import importlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fakes.channel import FakeChannel
from fakes.commands import call
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


def test_published_figures_are_of_the_newest_release() -> None:
    assert importlib.import_module("figures").behind() == {}, "measure them again"


def test_figures_that_a_release_has_left_behind_are_named(tmp_path: Path) -> None:
    """1. Measured before and at a release. 2. Code changes. 3. Another release."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]

    def commit(text: str, tag: str = "") -> str:
        (tmp_path / "services").mkdir(exist_ok=True)
        (tmp_path / "services" / "code.py").write_text(text)
        call([*git, "add", "."], check=True)
        call([*git, "commit", "-qm", text, "--allow-empty"], check=True)
        if tag:
            call([*git, "tag", tag], check=True)
        return call([*git, "rev-parse", "HEAD"], check=True).stdout.strip()

    call([*git, "init", "-q"], check=True)
    first, same = commit("one"), commit("two")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for name, at in {"old": first, "new": same, "none": ""}.items():
        (results / f"{name}.json").write_text(json.dumps({"commit": at}))
    behind = importlib.import_module("figures").behind
    assert set(behind(tmp_path)) == {"none"}, "there is no release yet"
    commit("two", tag="v0.2.0")  # the code that was measured
    assert set(behind(tmp_path)) == {"none", "old"}
    commit("three", tag="v0.3.0")
    assert set(behind(tmp_path)) == {"none", "old", "new"}
    assert "v0.3.0 has other code" in behind(tmp_path)["new"]


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


def test_a_disturbed_measurement_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = importlib.import_module("report")
    for others, timed, written in ((0.04, True, True), (0.2, True, False), (0.2, False, True)):
        monkeypatch.setattr(report.CpuShare, "others", lambda _, share=others: share)
        measured = report.Report("toy", timed=timed)
        measured.add(seconds=1.0)
        assert measured.show(tmp_path / "toy.json") is written
        assert (tmp_path / "toy.json").exists() is written
        (tmp_path / "toy.json").unlink(missing_ok=True)


def test_an_accuracy_is_reached_by_the_mean_of_ten_batches() -> None:
    from end_to_end import reached

    assert reached([0.95] * 9, 0.9) is None
    assert reached([0.5] * 5 + [0.95] * 30, 0.9) == 14
    assert reached([0.5, 1.0] * 20, 0.9) is None


def test_every_objective_of_the_staleness_grid_is_a_possible_run() -> None:
    from staleness import OBJECTIVES, Cell

    from umbra.deploy.commands.demo import DEMOS
    from umbra.services.config.loader import load_config
    from umbra.services.config.rules import objective_faults

    for objective in OBJECTIVES:
        cell = Cell("guess", objective, 8, 4, 0)
        config = load_config(DEMOS / "guess.toml", overrides=cell.overrides())
        assert list(objective_faults(config)) == [], objective
        assert config.buffer.run_ahead == config.buffer.max_staleness == 8


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


def audited(folder: Path, kept: str, batches: list[tuple[int, str]], **ended: int) -> Any:
    """Audit a run whose clients recorded these samples and batches."""
    import chaos_audit

    ledger = {"issued": 6, "trained": 4, "ended": ended, "in_flight": {}}
    (folder / "buffer.json").write_text(json.dumps({"ledger": ledger}))
    (folder / "acknowledged-1.txt").write_text(kept[: len(kept) // 2] + "\n")
    (folder / "acknowledged-2.txt").write_text(kept[len(kept) // 2 :] + "\n")
    trained = [{"step": step, "samples": names.split()} for step, names in batches]
    (folder / "trained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trained))
    rows = [{"kind": "step", "step": n, "reward/mean": n / 10} for n in (1, 2, 3, 2)]
    lines = [msgspec.json.encode(row).decode() for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"kind":"step","cut']))
    assert chaos_audit.curve(folder) == pytest.approx([0.1, 0.2, 0.3])
    return chaos_audit.audit(folder, folder)


def test_an_audit_counts_every_sample_by_the_records_of_clients(tmp_path: Path) -> None:
    """a to f were acknowledged; e is covered by a rule, f by nobody, whatever the ledger says."""
    found = audited(
        tmp_path, "a b c d e f", [(1, "a b"), (1, "a b"), (2, "c d")], stale=1, failed=9
    )
    assert (found.acknowledged, found.trained, found.untrained) == (6, 4, 2)
    assert (found.lost, found.twice, found.repeated, found.changed) == (1, 0, 1, 0)
    assert found.steps == [1, 2]


def test_an_audit_finds_samples_trained_twice_and_changed_batches(tmp_path: Path) -> None:
    found = audited(tmp_path, "a b c", [(1, "a x"), (1, "a b"), (2, "b c")])
    assert (found.trained, found.lost, found.twice) == (3, 0, 1)
    assert (found.repeated, found.changed) == (1, 1)


def test_a_generator_records_what_was_acknowledged_and_nothing_else(
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


def test_a_trainer_records_what_it_has_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import chaos_audit

    monkeypatch.setenv(chaos_audit.VARIABLE, str(tmp_path))
    rows: list[Any] = [None, {"loss": 0.0}]  # the first is broken off
    update = chaos_audit.noting(lambda *given: rows.pop(0))
    batch = SimpleNamespace(trajectories=[ANSWER])
    for _ in range(2):
        update(batch, 4, lambda: True)
    (line,) = (tmp_path / "trained.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 5, "samples": [ANSWER.sample_id]}


def test_a_pushed_model_is_cast_by_the_trainers_code_and_loaded_by_the_engines() -> None:
    from weight_model import Model

    from umbra.services.weights.manifest import checksums

    trained, served = Model(1 << 16, learns=True), Model(1 << 16)
    manifest = trained.manifest(4096)
    slot = memoryview(bytearray(manifest.total_bytes))
    trained.learn(1e-2)
    assert trained.write(manifest, slot) == checksums(manifest, slot)
    served.load(manifest, slot)
    assert served.equals(manifest, slot)
    for (name, ours), theirs in zip(trained.cast().items(), served.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert 0 < trained.learn(1e-3) < 1
    trained.write(manifest, slot)
    assert not served.equals(manifest, slot)
