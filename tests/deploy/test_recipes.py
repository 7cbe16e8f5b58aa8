"""The recipes for real models: each fits where it says, and trains a tiny model of its shape."""

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.full_rows import RowShape, full_rows
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from umbra.deploy.check.aside import count_of
from umbra.deploy.check.estimate import Estimate
from umbra.deploy.check.machine import GIB, Machine
from umbra.deploy.check.model_sizes import sizes_of
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_tokenizer

ROOT = Path(__file__).parents[2]
RECIPES = {path.stem: path for path in sorted((ROOT / "examples" / "recipes").glob("*.toml"))}
HOST, SHM = 1800 * GIB, 512 * GIB  # the least of a machine with eight such GPUs


def qwen3(
    hidden: int, units: int, layers: int, heads: int, kv_heads: int = 8, kind: Any = Qwen3Config,
    *, tied: bool = False, **more: Any,
) -> Any:  # fmt: skip
    return kind(
        vocab_size=151_936, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=tied,
        hidden_size=hidden, intermediate_size=units, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, **more,
    )  # fmt: skip


EXPERTS: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
# The published config.json of the models, by what the recipes call them: parameters and sizes.
MODELS: dict[str, tuple[float, Any]] = {
    "Qwen3-0.6B": (0.596e9, qwen3(1024, 3072, 28, 16, tied=True)),
    "Qwen3-8B": (8.19e9, qwen3(4096, 12_288, 36, 32)),
    "Qwen3-32B": (32.76e9, qwen3(5120, 25_600, 64, 64)),
    "Qwen3-30B-A3B": (
        30.53e9, qwen3(2048, 6144, 48, 32, 4, Qwen3MoeConfig, norm_topk_prob=True, **EXPERTS),
    ),
}  # fmt: skip


def tiny(config: Any, layers: int = 2) -> Any:
    """A config of the same class and proportions, of few numbers."""
    fields = config.to_dict()
    for name in ("layer_types", "dtype"):
        fields.pop(name, None)
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    fields |= {
        "vocab_size": len(make_tokenizer()),
        "hidden_size": 64,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": max(1, 4 * groups // heads),
        "intermediate_size": 64 * config.intermediate_size // config.hidden_size,
        "num_hidden_layers": layers,
        "max_position_embeddings": 512,
    }
    if "num_experts" in fields:
        fields |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return type(config)(**fields)


@cache
def recipe(name: str) -> RunConfig:
    return load_config(RECIPES[name], environ={})


@pytest.fixture(scope="module")
def estimates() -> dict[str, Estimate]:
    """Of each recipe, on H100s, from the config alone."""
    machine = msgspec.structs.replace(Machine.with_gpu("h100-80"), host=HOST, shm=SHM)
    found: dict[str, Estimate] = {}
    for name in RECIPES:
        config = recipe(name)
        model = MODELS[config.model.path][1]
        sizes = sizes_of(model, count_of(model, config.trainer))
        found[name] = Estimate(config, sizes, machine)
    return found


@pytest.mark.timeout(300)
def test_each_fits(estimates: dict[str, Estimate]) -> None:
    for name, found in estimates.items():
        assert not found.faults, (name, found.faults)
        last = max(found.loads)
        assert last == (0 if name.endswith("-1gpu") else 7)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    published, config = MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize("name", RECIPES)
def test_its_settings_train_a_tiny_model_of_that_shape(name: str) -> None:
    config = recipe(name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny(MODELS[config.model.path][1]))
    trainer = msgspec.structs.replace(config.trainer, device="cpu", ranks=1, precision="bf16")
    learner = Learner(model, trainer, config.run.steps)
    updated = learner._master_weights.of  # of bf16 weights float32 copies
    named = {n: updated(p) for n, p in learner.model.named_parameters()}
    trained = {n: p.detach().clone() for n, p in named.items() if p.requires_grad}
    assert all((".lora_" in n) == bool(trainer.lora_rank) for n in trained)
    micro = full_rows(RowShape(2, 32))
    drawn = torch.randint(64, (2, 32))  # equal tokens would leave attention nothing to learn
    micro = dataclasses.replace(micro, input_ids=drawn)
    for step in (0, 1):  # the first update of an adapter moves only its B, which begins at 0
        logprobs, _ = learner.score(micro, torch.ones(len(micro.targets)))
        learner.backward(-logprobs.mean())
        row = learner.update(step)
        assert (row["grad_norm"] or 0) > 0
        assert not row["skipped"]
    moved = [name for name, before in trained.items() if (named[name] != before).any()]
    assert len(moved) >= 0.9 * len(trained)
