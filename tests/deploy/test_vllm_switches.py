"""`umbra check-model` with a double of vLLM on a GPU: which of its switches isolates a fault."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from umbra.deploy.model_check.check import compare_vllm
from umbra.proto.errors import StartupError, UmbraError
from umbra.services.generator.vllm import check as vllm_check
from umbra.services.generator.vllm.check import Differences

CONFIG = SimpleNamespace(hidden_size=64, num_hidden_layers=2)
GOOD = Differences(0.01, 0.01, 0.01, 1.0, "bfloat16", 2)
BAD = Differences(0.01, 0.01, 0.9, 1.0, "bfloat16", 2)
STALE = Differences(0.01, 0.01, 0.01, 1.0, "bfloat16", 2, ("tp1 w",))


def runner(_: dict[str, Any]) -> Differences:
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        raise UmbraError("vLLM's engine core died")
    return GOOD


def start(given: dict[str, Any]) -> Differences:
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0":
        raise StartupError("vLLM's engine core did not start")
    return GOOD


@pytest.mark.parametrize(
    ("vllm", "outcomes", "notes"),
    [
        (lambda _: GOOD, ["equal"] * 4, []),
        (runner, ["different"], ["isolates the difference: set it", "not the cause"]),
        (start, ["different"], ["isolates the difference: set it", "not the cause"]),
        (
            lambda given: BAD if given.get("async_scheduling", True) else GOOD,
            ["equal", "equal", "different", "equal"],
            ["not the cause", "isolates the difference: set it"],
        ),
        (lambda _: STALE, ["equal"] * 3 + ["different"], ["not the cause"] * 2),
    ],
)
def test_which_switch_isolates_a_difference(
    vllm: Callable[[dict[str, Any]], Differences],
    outcomes: list[str],
    notes: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(vllm_check, "on_gpu", lambda: True)
    monkeypatch.setattr(vllm_check, "vllm_differences", lambda *_, **given: vllm(given))
    rows = list(compare_vllm(Path("model"), CONFIG))
    assert [row.outcome for row in rows[: len(outcomes)]] == outcomes
    assert [row.note for row in rows[len(outcomes) :]] == notes
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
