"""What the benchmarks compute: ideals, times to an accuracy, fairness, quick forms."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from umbra.proto.records import Sampling
from umbra.services.buffer.log_store import LogStore
from umbra.services.generator.engine import EngineRequest
from umbra.services.generator.replay_model import ReplayModel

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILLER, STOP = 5, 3


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).parent == BENCHMARKS:
            del sys.modules[name]


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

    from umbra.deploy.supervisor import Program

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
    from umbra.services.runtime.config_loader import load_config
    from umbra.services.runtime.objective_rules import objective_faults

    for objective in OBJECTIVES:
        cell = Cell("guess", objective, 8, 4, 0)
        config = load_config(DEMOS / "guess.toml", overrides=cell.overrides())
        assert list(objective_faults(config)) == [], objective
        assert config.buffer.run_ahead == config.buffer.max_staleness == 8


def test_every_quick_form_is_of_a_benchmark() -> None:
    import quick

    forms = quick.quick_forms()
    assert {"end_to_end", "ablations", "broker_scale", "long_tail"} <= forms.keys()
    for name in forms:
        assert '"--json"' in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")


def test_a_batchwise_engine_begins_nothing_while_anything_is_live() -> None:
    from batchwise_generator import BatchwiseEngine

    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    engine = BatchwiseEngine(
        ReplayModel(step_s=1.0, lengths=[2, 10]),
        vocabulary=50,
        filler=FILLER,
        stop=STOP,
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


def audited(folder: Path, batches: list[list[str]], issued: int, digests: list[str]) -> Any:
    """What `chaos_audit` makes of a run of these batches, one sample a group."""
    import chaos_audit

    store = LogStore(folder / "store")
    for step, names in enumerate(batches, 1):
        groups = [{"group_id": name, "samples": [{"sample_id": name}]} for name in names]
        store.put(f"b/{step}", msgspec.msgpack.encode({"groups": groups, "is_open": False}))
    store.commit()
    store.close()
    ledger = {"issued": issued, "trained": 4, "ended": {"stale": 1, "failed": 1}, "in_flight": {}}
    (folder / "buffer.json").write_bytes(msgspec.json.encode({"ledger": ledger}))
    rows = [{"kind": "handed_out", "step": 1, "digest": digest} for digest in digests]
    rows += [{"kind": "step", "step": n, "reward/mean": n / 10} for n in (1, 2, 3, 2)]
    lines = [msgspec.json.encode(row).decode() for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"kind":"step","cut']))
    assert chaos_audit.curve(folder) == pytest.approx([0.1, 0.2, 0.3])
    return chaos_audit.audit(folder)


def test_an_audit_finds_every_sample(tmp_path: Path) -> None:
    found = audited(tmp_path, [["a", "b"], ["c", "d"]], issued=6, digests=["x", "x"])
    assert (found.trained, found.twice, found.repeated, found.changed) == (4, 0, 1, 0)
    assert found.lost == 1, "the one that failed is nobody's"


def test_an_audit_finds_what_was_trained_twice_and_changed(tmp_path: Path) -> None:
    found = audited(tmp_path, [["a", "b"], ["b", "c"]], issued=4, digests=["x", "y"])
    assert (found.trained, found.twice, found.lost, found.changed) == (3, 1, 0, 1)
