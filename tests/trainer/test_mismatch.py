"""When generators are judged, by which figure, and against which bound."""

import math
from typing import Any

import pytest
import torch

from umbra.services.config.loader import load_config
from umbra.services.trainer.mismatch import BOUNDS, MIN_TOKENS, Compared, Verdicts, bound_of


def judge(*parts: list[float], every: int = 5) -> Compared | None:
    """The verdict on one generator, by k3 of its tokens in several batches."""
    verdicts, found = Verdicts(every), None
    for step, values in enumerate(parts):
        assert verdicts.due("a", step), "it was not judged"
        assert found is None
        found = verdicts.add(
            "a", step, torch.tensor(values, dtype=torch.float64), f"the worst of batch {step}"
        )
    return found


@pytest.mark.parametrize(
    ("parts", "figure", "where"),
    [
        ([[1e-9] * 99 + [math.inf]], 1e-9, 0),  # one token alone decides nothing
        ([[1e-9] * 50 + [math.inf], [1e-9] * 99 + [50.0]], 1 / 150, 0),  # two do, each by 1
        ([[1e-9] * 50 + [9.0], [1e-9] * 99 + [50.0]], 1 / 150, 1),
        ([[0.3] * 1000], 0.3, 0),
        ([[math.inf] * 100], 1.0, 0),
        ([[0.5] * (MIN_TOKENS - 1), [0.5]], 0.5, 0),  # few tokens wait for more
    ],
)
def test_the_figure_of_a_generator(parts: list[list[float]], figure: float, where: int) -> None:
    found = judge(*parts)
    assert found is not None
    assert found.mismatch == pytest.approx(figure, rel=1e-3)
    assert found.tokens == sum(map(len, parts))
    assert found.where == f"the worst of batch {where}"


def test_who_was_judged_is_due_again_after_some_steps() -> None:
    verdicts, enough = Verdicts(every=5), torch.zeros(MIN_TOKENS)
    assert verdicts.due("a", 3)
    assert verdicts.add("a", 3, enough, "") is not None
    assert [verdicts.due("a", step) for step in (4, 7, 8, 9)] == [False, False, True, True]
    assert verdicts.add("a", 8, enough[:1], "") is None, "the count restarts"
    assert verdicts.due("b", 4), "one that comes later is due at once"
    assert judge([0.5] * (MIN_TOKENS - 1)) is None
    assert Compared(0, tokens=1, total=1.0, worst=math.inf).mismatch == 0.0, "of one token none"
    assert not Verdicts(every=0).due("a", 0)


def test_nothing_known_for_long_is_told_once() -> None:
    verdicts = Verdicts(every=5)
    for step in range(40):
        verdicts.due("a", step)
        told = verdicts.unknown(["a"], step)
        assert told == (["a"] if step == 15 else []), step
    verdicts.add("a", 40, torch.zeros(64), "")
    assert [s for s in range(41, 80) if verdicts.unknown(["a"], s)] == [55]


VLLM = "generator.engine=vllm"


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", [], "float32"),
        ("cpu", ["trainer.precision=bf16"], "bfloat16"),
        ("cpu", ["weight_hub.dtype=bfloat16"], "bfloat16"),
        ("cpu", ["weight_hub.dtype=float16"], "float16"),
        ("cpu", [VLLM, 'generator.engine_args={quantization = "fp8"}'], "fp8"),
        ("cpu", [VLLM, 'generator.engine_args={kv_cache_dtype = "fp8_e4m3"}'], "fp8"),
        ("cuda", [], "bfloat16"),  # as `auto` stands for there
        ("cuda", ["trainer.precision=no"], "bfloat16"),
        ("cuda", ["weight_hub.dtype=float32"], "bfloat16"),
        ("cuda", ["trainer.precision=no", "weight_hub.dtype=float32"], "float32"),
    ],
)
def test_a_bound_fits_the_coarsest_format(device: str, settings: list[str], expected: str) -> None:
    def config(*more: str) -> Any:
        return load_config(overrides=[*settings, *more, "model.path=m"], environ={})

    assert bound_of(config(), device) == (BOUNDS[expected], expected)
    assert bound_of(config("trainer.max_mismatch=0.5"), device) == (0.5, expected)
