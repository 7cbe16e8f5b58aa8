"""vLLM after a publish = vLLM from disk = Transformers, architecture by architecture.

By `make test-real`, as each starts a vLLM of its own; `test_vllm_engine.py` compares one always.
"""

from pathlib import Path

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.commands import needs
from fakes.vllm_models import BOUND, examine, quantized, recorded

from umbra.services.generator.vllm import options as vllm_options

needs("vllm")
pytestmark = [
    pytest.mark.timeout(600),  # starting it takes 20 to 40 s on a machine with nothing else to do
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
NEEDS_AMX = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(),
    reason="this processor has no AMX, for which vLLM has its one kernel of int8 experts",
)


def test_every_architecture_is_in_the_record() -> None:
    assert recorded().keys() == ARCHITECTURES.keys()


@pytest.mark.real
@pytest.mark.parametrize("name", recorded())
def test_vllm_serves_what_is_published(name: str, tmp_path: Path) -> None:
    found = examine(name, tmp_path)
    expected = recorded()[name]
    assert found["outcome"] == expected["outcome"], found
    assert found.get("why") == expected.get("why")


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen3", "fp8_per_channel"),
        pytest.param("qwen3-moe", "int8_per_channel_weight_only", marks=NEEDS_AMX),
    ],
)
def test_what_is_quantized_survives_new_weights(name: str, method: str, tmp_path: Path) -> None:
    """A publish takes logprobs as far from Transformers' as the same weights from disk do."""
    found, changed_from_disk = quantized(name, method, tmp_path)
    assert found.from_disk > BOUND  # it is quantized
    assert not found.stale
    assert found.same < 2 * found.from_disk
    assert found.changed < 2 * changed_from_disk


@pytest.mark.real
def test_a_load_that_does_not_reach_all_weights_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's gpt_oss says that it loaded its experts and sinks, and did not."""
    monkeypatch.setattr(vllm_options, "check_served", lambda *_: None)
    found = examine("gpt-oss", tmp_path)
    assert found["outcome"] == "engine"
    assert "vLLM found no weights for model.layers.0.attn.sinks" in found["why"]
