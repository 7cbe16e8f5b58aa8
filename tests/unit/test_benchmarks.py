"""What the benchmarks compute: ideals, times to an accuracy, fairness, quick forms."""

import json
import sys
import threading
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from fakes.trajectories import trajectory

from umbra.proto.messages import SubmitAck
from umbra.proto.records import (
    Sampling,
    ScoringTask,
)
from umbra.services.generator.engines.engine import EngineRequest
from umbra.services.generator.replay_model import ReplayModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILLER, STOP = 5, 3
ANSWER = trajectory([1, 2], [3, 4, 5], [-1.0, -2.0, -3.0], sample_id="a", reward=0.5)


pytestmark = pytest.mark.usefixtures("benchmarks_importable")


def steady(**changes: Any) -> Any:
    import whole_runs

    figures: dict[str, Any] = {
        "steps": 10,
        "seconds": 20.0,
        "samples": 1280,
        "tokens": 128_000.0,
        "prompt_tokens": 0.0,
        "reward": 0.0,
        "staleness": 0.0,
        "staleness_max": 0.0,
        "decoded": 0.0,
        "generator_idle": 0.0,
        "trainer_idle": 0.0,
    }
    return whole_runs.Steady(**(figures | changes))


def test_the_ideal_is_that_of_the_slower_side() -> None:
    import replay_cells as cells

    mode = cells.Mode("m", generators=4, training=4, steps=20, ahead=1)
    best = cells.ideal(mode, steady())
    # 12,800 tokens a step; 16 slots of four generators make 16 tokens in 8 ms each.
    assert best.generation_s == pytest.approx(12_800 / (4 * 16) * 0.008 + cells.PAUSE_S)
    assert best.training_s == pytest.approx(0.1 + 1e-4 * 12_800)
    assert best.step_s == best.generation_s
    slow = cells.Mode("m", generators=4, training=4, steps=20, ahead=1, more_training=2.0)
    assert cells.ideal(slow, steady()).step_s == pytest.approx(2 * best.training_s)


def test_who_takes_turns_waits_for_the_longest_and_then_trains() -> None:
    import replay_cells as cells

    mode = cells.Mode("m", cells.ACCELERATORS, cells.ACCELERATORS, steps=20, ahead=0)
    update = 0.05 + 5e-5 * 12_800
    # All of a batch have slots; the last of 16 with 80 to 120 tokens has nearly 120.
    assert cells.turns_s(mode, "uniform", 20) == pytest.approx(
        120 * 0.0077 + cells.PAUSE_S + update, rel=0.03
    )
    assert cells.turns_s(mode, "long-tailed", 20) > 2 * cells.turns_s(mode, "uniform", 20)


@pytest.mark.parametrize("mix", ["long-tailed", "uniform"])
def test_mixes_have_the_same_mean(mix: str) -> None:
    import replay_cells as cells

    model = cells.replay_model(mix)
    count = 20_000
    lengths = [model.length((n + 0.5) / count) for n in range(count)]
    assert sum(lengths) / count == pytest.approx(cells.MEAN_TOKENS, rel=0.02)
    assert max(lengths) / cells.MEAN_TOKENS == pytest.approx(
        {"long-tailed": 6.6, "uniform": 1.2}[mix], rel=0.05
    )


def test_an_accuracy_is_reached_by_the_mean_of_ten_batches() -> None:
    import demo_cells

    assert demo_cells.reached([0.95] * 9) is None
    assert demo_cells.reached([0.5] * 5 + [0.95] * 30) == 14
    assert demo_cells.reached([0.5, 1.0] * 20) is None


def test_a_script_takes_the_place_of_a_command() -> None:
    import whole_runs

    from umbra.services.process.supervisor import Program

    flags = ("--config", "c.json", "--name", "n")
    trainer = Program("trainer", (sys.executable, "-m", "umbra", "trainer", *flags), wave=0)
    scripts = {"trainer": ("timed_trainer.py", "0.5", "0")}
    chosen = whole_runs.instead(trainer, scripts)
    script = str(BENCHMARKS / "timed_trainer.py")
    assert chosen.argv == (sys.executable, script, "0.5", "0", *flags)
    assert whole_runs.instead(trainer, {"generator": ("x.py",)}) is trainer


def test_jains_index() -> None:
    import broker_scale

    assert broker_scale.fairness([3, 3, 3]) == pytest.approx(1.0)
    assert broker_scale.fairness([9, 0, 0]) == pytest.approx(1 / 3)


def test_runs_of_the_staleness_grid_that_would_be_the_same_are_made_once() -> None:
    from staleness_cells import cells

    def on_policy(objectives: list[str], minibatches: int) -> list[str]:
        found = cells(["sort"], objectives, [0, 1], [minibatches], [0])
        return [cell.objective for cell in found if cell.staleness == 0]

    assert on_policy(["ppo", "cispo", "tis"], 1) == ["ppo"]
    assert on_policy(["ppo", "cispo", "tis"], 4) == ["ppo", "cispo"]  # its clip is not ppo's
    assert len(list(cells(["sort", "guess"], ["ppo", "tis"], [0, 8], [1, 4], [0, 1]))) == 24


def test_every_objective_of_the_staleness_grid_is_a_possible_run() -> None:
    from staleness_cells import OBJECTIVES, Cell

    from umbra.deploy.demo import DEMOS
    from umbra.services.config.loader import load_config
    from umbra.services.config.objective_rules import objective_faults

    for objective in OBJECTIVES:
        cell = Cell("guess", objective, 8, 4, 0)
        config = load_config(DEMOS / "guess.toml", overrides=cell.overrides())
        assert list(objective_faults(config)) == [], objective
        assert config.buffer.run_ahead == config.buffer.max_staleness == 8


def test_every_rule_against_staleness_is_a_possible_run(tmp_path: Path) -> None:
    from staleness_rules import RULES, Cell, settings

    from umbra.services.config.objective_rules import objective_faults

    for rule in RULES:
        config = settings(Cell("sort", rule, 8, 4, 0, False), tmp_path)
        assert list(objective_faults(config)) == [], rule
        assert (config.run.steps, config.trainer.schedule) == (60, "constant")
    assert settings(Cell("sort", "ppo", 8, 1, 0, True), tmp_path).run.steps == 360


def test_every_cell_can_be_run_by_its_key() -> None:
    import end_to_end

    args = end_to_end.parse(["--form", *end_to_end.FORMS, "--tasks", *end_to_end.TASKS])
    cells = end_to_end.all_cells(args)
    assert {cell.form for cell in cells} > {"replay"}
    assert all(end_to_end.cell_of(cell.key) == cell for cell in cells)


def test_every_quick_form_is_of_a_benchmark() -> None:
    import quick

    forms = quick.quick_forms()
    assert {"end_to_end", "ablations", "broker_scale", "long_tail"} <= forms.keys()
    for name in forms:
        assert '"--json"' in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")


def test_a_batchwise_engine_begins_nothing_while_anything_is_live() -> None:
    from batchwise_generator import BatchwiseEngine

    from umbra.services.generator.replay_engine import ReplayTokens

    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    engine = BatchwiseEngine(
        ReplayModel(step_s=1.0, lengths=[2, 10]),
        ReplayTokens(vocabulary=50, filler=FILLER, stop=STOP),
        slots=2,
        max_context=64,
        version=0,
        clock=lambda: now[0],
        wait=wait,
    )
    engine.submit(EngineRequest(f"r{n}", [7], Sampling(), 60) for n in range(5))
    lives: list[int] = []
    done: list[str] = []
    while engine.busy:
        done += [output.request_id for output in engine.poll(0.5)]
        lives.append(engine.live)
    assert sorted(done) == [f"r{n}" for n in range(5)]
    rises = [(a, b) for a, b in pairwise(lives) if b > a]
    assert all(before == 0 for before, _ in rises)


def noted(folder: Path, kept: str, batches: list[tuple[int, str]]) -> None:
    """Notes of clients: samples that were acknowledged, and what each step was trained on."""
    (folder / "acknowledged-1.txt").write_text(kept[: len(kept) // 2] + "\n")
    (folder / "acknowledged-2.txt").write_text(kept[len(kept) // 2 :] + "\n")
    rows = [{"step": step, "samples": names.split()} for step, names in batches]
    (folder / "trained.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def audited(folder: Path, kept: str, batches: list[tuple[int, str]], **ended: int) -> Any:
    """What `chaos_audit` makes of a run of which its clients noted this."""
    import chaos_audit

    ledger = {"issued": 6, "trained": 4, "ended": ended, "in_flight": {}}
    (folder / "buffer.json").write_text(json.dumps({"ledger": ledger}))
    noted(folder, kept, batches)
    rows = [{"kind": "step", "step": n, "reward/mean": n / 10} for n in (1, 2, 3, 2)]
    lines = [msgspec.json.encode(row).decode() for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"kind":"step","cut']))
    assert chaos_audit.curve(folder) == pytest.approx([0.1, 0.2, 0.3])
    return chaos_audit.audit(folder, folder)


def test_an_audit_takes_the_clients_word_for_every_sample(tmp_path: Path) -> None:
    """a to f were acknowledged; e is covered by a rule, f by nobody, whatever the ledger says."""
    found = audited(
        tmp_path, "a b c d e f", [(1, "a b"), (1, "a b"), (2, "c d")], stale=1, failed=9
    )
    assert (found.acknowledged, found.trained, found.untrained) == (6, 4, 2)
    assert (found.lost, found.twice, found.repeated, found.changed) == (1, 0, 1, 0)
    assert found.steps == [1, 2]


def test_an_audit_finds_what_was_trained_twice_and_changed(tmp_path: Path) -> None:
    found = audited(tmp_path, "a b c", [(1, "a x"), (1, "a b"), (2, "b c")])
    assert (found.trained, found.lost, found.twice) == (3, 0, 1)
    assert (found.repeated, found.changed) == (1, 1)


def test_a_generator_notes_what_was_acknowledged_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import noted as notes

    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    futures: list[Future[Any]] = []

    class Channel:
        def request(self, body: Any, **_: Any) -> Future[Any]:
            futures.append(Future())
            return futures[-1]

    client = notes.noting_client()(Channel(), threading.Event())
    client.submit([msgspec.structs.replace(ANSWER, sample_id=name) for name in ("a", "b")])
    client.wait(0.0)
    client.poll()
    assert notes.read_notes(tmp_path).acknowledged == set()
    futures[0].set_result(SubmitAck(accepted=1, refused={"b": "stale"}))
    client.poll()
    assert notes.read_notes(tmp_path).acknowledged == {"a"}


def test_a_trainer_notes_what_it_has_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import noted as notes

    monkeypatch.setenv(notes.VARIABLE, str(tmp_path))
    rows: list[Any] = [None, {"loss": 0.0}]  # the first is broken off
    update = notes.noting(lambda config: lambda *given: rows.pop(0))("config")
    batch = SimpleNamespace(trajectories=[ANSWER])
    for _ in range(2):
        update(batch, 4, lambda: True)
    assert notes.read_notes(tmp_path).batches == {5: [ANSWER.sample_id]}


def test_the_reference_pass_takes_its_time_wherever_it_runs() -> None:
    import ablations
    import replay_cells as cells

    parts = [part.mode for part in ablations.PARTS if part.block == "reference"]
    alone, beside, more = parts
    tokens = 12_800
    update = cells.TRAIN_S + cells.TRAIN_TOKEN_S * tokens
    whole = alone.train_step_s + alone.train_token_s * tokens
    assert whole == pytest.approx(update * (1 + cells.REFERENCE) / 4)
    assert beside.train_step_s + beside.train_token_s * tokens == pytest.approx(update / 3)
    for mode in (beside, more):
        _, sample_s, token_s = mode.scripts["scorer"]
        spent = cells.SAMPLES * float(sample_s) + tokens * float(token_s)
        assert spent == pytest.approx(update * cells.REFERENCE)


def test_a_timed_scorer_sleeps_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    import timed_scorer

    slept: list[float] = []
    monkeypatch.setattr(timed_scorer.time, "monotonic", lambda: 100.0 + sum(slept))
    monkeypatch.setattr(timed_scorer.time, "sleep", slept.append)
    task = ScoringTask(sample_id="a", attempt=1, row={}, lease_s=9.0, trajectory=ANSWER)
    worker = timed_scorer.TimedWorker(0.5, 0.25)
    ((score,),) = worker.score([task], lambda: None)
    assert score.logprobs == ANSWER.logprobs
    list(worker.score([task], lambda: None))
    assert sum(slept) == pytest.approx(2 * (0.5 + 5 * 0.25) - 0.05)  # 2 prompt, 3 response tokens


def test_both_modes_of_other_systems_have_the_same_slots() -> None:
    import scale

    by_gpus: dict[str, set[int]] = {}
    for case, scenario in scale.verl():
        by_gpus.setdefault(case.partition("/")[2], set()).add(scenario.config.generator.slots)
    assert {gpus: len(slots) for gpus, slots in by_gpus.items()} == {"32": 1, "64": 1, "128": 1}
    assert len({scenario.config.generator.slots for _, scenario in scale.areal()}) == 1


def test_the_simulator_is_calibrated_by_no_run_that_it_predicts() -> None:
    import end_to_end
    import simulator

    predicted = end_to_end.all_cells(end_to_end.parse(["--form", "replay"]))
    assert simulator.CALIBRATION.name not in {cell.mode.name for cell in predicted}
    assert simulator.CALIBRATION_SEED not in {cell.seed for cell in predicted}


def test_peers_of_the_buffer_send_as_many_records_together() -> None:
    import peers
    from buffer_throughput import ratio

    assert peers.BATCHES[peers.REDIS_KIND] == peers.BATCHES[peers.RAY_KIND] == peers.BATCH
    assert ratio([10.0, 40.0, 30.0], [10.0, 10.0, 10.0]) == 3.0


def test_a_pushed_model_is_cast_by_the_trainers_code_and_loaded_by_the_engines() -> None:
    from weight_model import Model

    trained, served = Model(1 << 16, learns=True), Model(1 << 16)
    manifest = trained.manifest(4096)
    slot = memoryview(bytearray(manifest.total_bytes))
    told: list[int] = []
    trained.learn(1e-2)
    trained.write(manifest, slot, told.append)
    assert told[-1] == manifest.total_bytes
    served.load(manifest, slot)
    assert served.equals(manifest, slot)
    for (name, ours), theirs in zip(trained.cast().items(), served.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    assert 0 < trained.learn(1e-3) < 1
    trained.write(manifest, slot, told.append)
    assert not served.equals(manifest, slot)


@pytest.mark.parametrize("share", [1, 8])
def test_no_bucket_of_a_pushed_model_is_what_it_was_before(share: int) -> None:
    """Otherwise it would not be sent again."""
    from weight_model import Model

    from umbra.services.weights.manifest import checksums

    trained, served = Model(1 << 20, learns=True, share=share), Model(1 << 20, share=share)
    own = sum(tensor.untyped_storage().nbytes() for tensor in list(trained.parameters())[:1])
    assert share == 1 or own <= 2 * trained.nbytes / share  # float32
    manifest = trained.manifest(1 << 17)
    slot = memoryview(bytearray(manifest.total_bytes))
    seen: set[int] = set()
    for version in range(1, 4):
        trained.touch()
        trained.write(manifest, slot, lambda _: None)
        seen |= set(checksums(manifest, slot))
        assert len(seen) == version * len(manifest.buckets)
    served.load(manifest, slot)
    assert served.equals(manifest, slot)


def test_the_quick_push_has_every_form() -> None:
    import weight_push
    from weight_tables import PARTS

    def kinds(*argv: str) -> set[tuple[str, str, str]]:
        options = weight_push.parse(list(argv))
        return {(form.part, form.method, form.link) for form in weight_push.forms(options)}

    assert kinds("--quick") == kinds()
    assert len({part for part, _, _ in kinds()}) == len(PARTS)


def test_a_version_that_is_too_large_for_the_machine_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import weight_push
    from weight_tables import LARGE

    form = list(weight_push.forms(weight_push.parse([])))[-1]
    assert form.part == LARGE
    monkeypatch.setattr(weight_push, "available_bytes", lambda: 8 << 30)
    assert weight_push.lacking(form) == "it needs 15.5 GiB of memory, and 8.0 are free"
    monkeypatch.setattr(weight_push, "available_bytes", lambda: 16 << 30)
    assert weight_push.lacking(form) == ""
