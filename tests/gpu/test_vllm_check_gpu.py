"""vLLM on a GPU after publishes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.vllm_models import write_model
from transformers import AutoConfig

from umbra.deploy.model_check.check import compare_vllm

pytest.importorskip("vllm", reason='vLLM is not installed (pip install "umbra-rl[vllm]")')
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # with kernels to compile
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def test_publishes_reach_all_workers(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    directory = write_model("qwen3", tmp_path / "model")
    rows = list(compare_vllm(directory, AutoConfig.from_pretrained(directory)))
    for row in rows:
        record_property(row.name, f"{row.outcome}, {row.as_text()}")
    assert [row.outcome for row in rows] == ["equal"] * 4, rows
