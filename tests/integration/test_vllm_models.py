"""vLLM after a publish = vLLM from disk = Transformers, architecture by architecture.

A few are tried always, the rest by `make test-real`: each starts a vLLM of its own.
"""

from pathlib import Path

import pytest
from fakes.architectures import ARCHITECTURES
from fakes.vllm_models import BOUND, QUICK, examine, recorded, write_model

from umbra.services.generator.vllm_check import vllm_differences
from umbra.services.trainer.snapshot import whole_weights

pytest.importorskip("vllm", reason="vLLM is not installed (make setup)")
pytestmark = [
    pytest.mark.timeout(600),  # starting it takes 20 to 40 s on a machine with nothing else to do
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def test_every_architecture_is_in_the_record() -> None:
    assert recorded().keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.real) for name in recorded()],
)
def test_vllm_serves_what_is_published(name: str, tmp_path: Path) -> None:
    found = examine(name, tmp_path)
    expected = recorded()[name]
    assert found["outcome"] == expected["outcome"], found
    assert found.get("why") == expected.get("why")


@pytest.mark.real
@pytest.mark.parametrize("method", ["fp8_per_channel", "int8_per_channel_weight_only"])
def test_quantized_experts_and_layers_survive_new_weights(method: str, tmp_path: Path) -> None:
    """Rounding to 8 bits moves logprobs; it does so no more after a load than before."""
    found = vllm_differences(
        write_model("qwen3-moe", tmp_path / "model"),
        lambda model: whole_weights(model).items(),
        dtype="bfloat16",
        quantization=method,
    )
    assert BOUND < found.from_disk < 0.5 * found.moved
    assert max(found.same, found.changed) < 2 * found.from_disk
