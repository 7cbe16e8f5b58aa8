"""When generators are judged, by which figure, and against which bound; no tensor is needed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from umbra.services.config.loader import load_config
from umbra.services.trainer.mismatch import BOUNDS, MIN_TOKENS, Compared, Verdicts, bound_of


def found(tokens: int, k3: float, worst: float | None = None, where: str = "") -> Compared:
    """Tokens of equal k3, but for one."""
    last = k3 if worst is None else worst
    return Compared(tokens, (tokens - 1) * min(k3, 1.0) + min(last, 1.0), last, where)


def test_one_token_alone_decides_nothing_and_two_do() -> None:
    good = found(100, 1e-9, worst=math.inf)
    assert good.mismatch == pytest.approx(1e-9)
    two = good + found(100, 1e-9, worst=50.0)
    assert two.mismatch == pytest.approx(1 / 199, rel=1e-3), "each counts one at most"
    assert found(1000, 0.3).mismatch == pytest.approx(0.3)
    assert Compared(1, 1.0, math.inf).mismatch == 0.0
    assert math.isfinite(found(100, math.inf).mismatch)


def test_few_tokens_wait_for_more() -> None:
    verdicts = Verdicts(1e-4, every=5)
    part = found(MIN_TOKENS - 1, 0.5)
    assert verdicts.due("a", 0), "it was never looked at"
    assert verdicts.add({"a": part}, 0) == (None, {})
    assert verdicts.due("a", 0), "that was not enough"
    largest, above = verdicts.add({"a": found(2, 0.5)}, 1)
    assert largest == pytest.approx(0.5)
    assert above["a"].tokens == MIN_TOKENS + 1
    assert verdicts.add({"a": found(2, 0.5)}, 2) == (None, {}), "the count restarts"


def test_each_generator_is_judged_for_itself() -> None:
    verdicts = Verdicts(1e-4, every=5)
    largest, above = verdicts.add({"good": found(10**6, 1e-10), "bad": found(64, 0.2)}, 0)
    assert list(above) == ["bad"]
    assert largest == pytest.approx(0.2)


def test_who_was_judged_is_due_again_after_some_steps() -> None:
    verdicts = Verdicts(1e-4, every=5)
    verdicts.due("a", 3)
    verdicts.add({"a": found(64, 0.0)}, 3)
    assert [verdicts.due("a", step) for step in (4, 7, 8, 9)] == [False, False, True, True]
    assert verdicts.due("b", 4), "one that comes later is due at once"
    never = Verdicts(1e-4, every=0)
    assert not never.due("a", 0)


def test_nothing_known_for_long_is_told_once() -> None:
    verdicts = Verdicts(1e-4, every=5)
    for step in range(40):
        verdicts.due("a", step)
        told = verdicts.unknown(["a"], step)
        assert told == (["a"] if step == 15 else []), step
    verdicts.add({"a": found(64, 0.0)}, 40)
    assert [s for s in range(41, 80) if verdicts.unknown(["a"], s)] == [55]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], "float32"),
        (["trainer.precision=bf16"], "bfloat16"),
        (["weight_hub.dtype=bfloat16"], "bfloat16"),
        (["weight_hub.dtype=float16"], "float16"),
        (["generator.engine=vllm", 'generator.engine_args={quantization = "fp8"}'], "fp8"),
        (["generator.engine=vllm", 'generator.engine_args={kv_cache_dtype = "fp8_e4m3"}'], "fp8"),
    ],
)
def test_the_bound_fits_the_coarsest_format(settings: list[str], expected: str) -> None:
    def config(*more: str) -> Any:
        return load_config(overrides=[*settings, *more, "model.path=m"], environ={})

    assert bound_of(config(), "cpu") == (BOUNDS[expected], expected)
    assert bound_of(config("trainer.max_mismatch=0.5"), "cpu") == (0.5, expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], "bfloat16"),
        (["trainer.precision=no"], "bfloat16"),
        (["weight_hub.dtype=float32"], "bfloat16"),
        (["trainer.precision=no", "weight_hub.dtype=float32"], "float32"),
    ],
)
def test_on_a_gpu_it_is_that_of_the_formats_that_auto_stands_for(
    settings: list[str], expected: str
) -> None:
    config = load_config(overrides=[*settings, "model.path=m"], environ={})
    assert bound_of(config, "cuda") == (BOUNDS[expected], expected)
