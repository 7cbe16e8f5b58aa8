"""`umbra check-model` with a double of vLLM on a GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from umbra.deploy.model_check.check import compare_vllm
from umbra.proto.errors import StartupError, UsageError
from umbra.services.generator.vllm import check as vllm_check
from umbra.services.generator.vllm.check import Differences

CONFIG = SimpleNamespace(hidden_size=64, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("changed", "stale", "outcomes"),
    [
        (0.01, (), ["equal"] * 4),
        (0.9, (), ["equal", "equal", "different", "equal"]),
        (0.01, ("tp1 w",), ["equal"] * 3 + ["different"]),
    ],
)
def test_rows(
    changed: float, stale: tuple[str, ...], outcomes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Differences(0.01, 0.01, changed, 1.0, "bfloat16", 2, stale)
    monkeypatch.setattr(vllm_check, "vllm_differences", lambda *_, **_arguments: result)
    assert [row.outcome for row in compare_vllm(Path("model"), CONFIG)] == outcomes


@pytest.mark.parametrize("error", [UsageError, StartupError])
@pytest.mark.parametrize("gpu", [False, True])
def test_only_on_a_gpu_a_failed_start_is_an_error(
    error: type[UsageError | StartupError], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **_arguments: object) -> Differences:
        raise error("why")

    monkeypatch.setattr(vllm_check, "vllm_differences", refuse)
    monkeypatch.setattr(vllm_check, "on_gpu", lambda: gpu)
    rows = compare_vllm(Path("model"), CONFIG)
    if gpu and error is StartupError:
        with pytest.raises(StartupError, match="why"):
            list(rows)
    else:
        assert [(row.outcome, row.note) for row in rows] == [("left out", "why")]
