"""What the benchmarks compute: ideals, times to an accuracy, fairness, quick forms."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from umbra.proto.records import Sampling
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


def test_jains_index() -> None:
    import broker_scale

    assert broker_scale.fairness([3, 3, 3]) == pytest.approx(1.0)
    assert broker_scale.fairness([9, 0, 0]) == pytest.approx(1 / 3)


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
