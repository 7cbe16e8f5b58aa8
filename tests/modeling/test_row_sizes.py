"""Rows and passes of `auto`: by model, memory and the longest response."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from transformers import AutoModelForCausalLM, Qwen3Config

from umbra.services.config import TrainerConfig
from umbra.services.modeling.row_sizes import RowSizes, activation_bytes, scoring_rows
from umbra.services.trainer import speed as module
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.rendezvous import RankPlace
from umbra.services.trainer.speed import row_sizes

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


@pytest.fixture(scope="module")
def model() -> Any:
    """A model of 8 billion weights, without memory for them."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def sizes(model: Any, device: torch.device = CPU, max_tokens: int = 0, **keys: Any) -> RowSizes:
    return row_sizes(TrainerConfig(**keys), model, device, Ranks(), max_tokens)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set how many GiB a device has."""
    return lambda gib: monkeypatch.setattr(module, "memory_of", lambda *_: int(gib * GIB))


@pytest.mark.parametrize(
    ("longest", "row", "passed"), [(16, 256, 4096), (500, 1000, 4096), (30000, 60000, 60000)]
)
def test_a_row_has_room_for_two_of_the_longest_responses(
    model: Any, memory: Callable[[float], None], longest: int, row: int, passed: int
) -> None:
    memory(3000)
    assert sizes(model, max_tokens=longest) == (row, passed)


def test_a_pass_on_a_gpu_is_one_row_that_fits(model: Any, memory: Callable[[float], None]) -> None:
    memory(141)
    plain = sizes(model, GPU, activation_checkpointing=False)
    assert plain.pack_tokens == plain.micro_tokens
    again = sizes(model, GPU)
    assert again.micro_tokens > 8 * plain.micro_tokens
    assert sizes(model, GPU, activation_checkpointing="selective") == plain
    memory(3000)
    assert sizes(model, GPU) == sizes(model, GPU, precision="no") == (65536, 65536)
    ranks: Any = SimpleNamespace(
        world=2,
        place=RankPlace(0, 2, 2),
        gather=lambda own: torch.stack([own, own * 0 + 777]),
    )
    assert row_sizes(TrainerConfig(), model, GPU, ranks) == (777, 777), "of the smallest"


def test_activations_of_a_small_model_are_about_what_they_say() -> None:
    """Counted are the bytes of what autograd keeps, each tensor's memory once."""
    model: Any = ARCHITECTURES["qwen3"].model().model
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.zeros(1, 500, dtype=torch.int64), use_cache=False)
    found = sum(storage.nbytes() for storage in kept.values()) / 500
    assert 0.6 < found / activation_bytes(TrainerConfig(), model.config) < 1.2


def test_a_scorer_keeps_one_layer_at_a_time(model: Any) -> None:
    """Its passes are longer than a trainer's where memory is short, and no longer than useful."""
    weights = sum(parameter.numel() for parameter in model.parameters())

    def rows(gib: float, kind: str, max_tokens: int = 0, **keys: Any) -> RowSizes:
        config, memory = TrainerConfig(**keys), int(gib * GIB)
        return scoring_rows(config, model.config, weights, 2, memory, kind, max_tokens)

    assert rows(80, "cuda") == (16384, 16384)
    assert 256 < rows(18, "cuda").micro_tokens < 16384
    assert rows(8, "cuda") == (256, 256)
    assert rows(80, "cpu", 3000) == (6000, 6000)
    assert rows(80, "cuda", 3000, pack_tokens=64) == (64, 16384)
    assert rows(80, "cuda", micro_tokens=512) == (512, 512)
