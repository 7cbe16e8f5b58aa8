"""vLLM on a GPU serves weights that were pushed as it serves the same weights from disk."""

from pathlib import Path

import pytest
from fakes.vllm_models import quantized

pytest.importorskip("vllm", reason='vLLM is not installed (pip install "umbra-rl[vllm]")')
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),  # it compiles kernels and captures graphs
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
GRAPHS = ("qwen3-moe", "fp8")  # captured for these alone: each capture takes a minute


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3-moe"])
@pytest.mark.parametrize("method", [None, "fp8", "fp8_per_channel"])
def test_new_weights_are_served_as_those_from_disk(
    architecture: str, method: str | None, tmp_path: Path
) -> None:
    """A publish takes logprobs as far from Transformers' as the same weights from disk do."""
    own = {"gpu_memory_utilization": 0.3, "enforce_eager": (architecture, method) != GRAPHS}
    found, changed_from_disk = quantized(architecture, method, tmp_path, **own)
    assert not found.stale
    assert found.same < 2 * found.from_disk
    assert found.changed < 2 * changed_from_disk
