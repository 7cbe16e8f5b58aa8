"""`umbra check`: what a trainer's rank takes is what it is told to need, by every key of memory.

Ranks load a model and train, in processes of their own; the kernel tells what that took.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.rank_processes import TESTS, launch, see_through
from transformers import AutoModelForCausalLM, Qwen3Config

from umbra.deploy.check.aside import count_of
from umbra.deploy.check.estimate import LOADING, PASS, Item, needs
from umbra.deploy.check.model_sizes import sizes_of
from umbra.services.config.loader import load_config

MOST = 1.3  # times the measured bytes
OBJECTS = 3 << 20  # Python's, of the model and FSDP; they are of the item `process`
NARROW: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """Settings of the trainer, and the rows of its fullest micro-batch."""

    trainer: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, int] = (2, 256)


BF16 = {"precision": "bf16", "weights": "bf16"}
ALONE = {
    "float32": Case(),
    "bf16 weights": Case(BF16),
    "host optimizer": Case({"offload": "optimizer"}),
    "host optimizer, bf16 weights": Case({"offload": "optimizer", **BF16}),
    "offload all": Case({"offload": "all", "activation_checkpointing": True}, (4, 512)),
    "adapter of a bf16 base": Case({"lora_rank": 8, **BF16}),
    "long rows, bf16 weights": Case(BF16, (2, 1024)),
}
SHARDED = {
    "float32": Case(),
    "bf16": Case({"precision": "bf16"}),
    "bf16 weights": Case(BF16),
    "host optimizer": Case({"offload": "optimizer"}),
    "offload all": Case({"offload": "all", "activation_checkpointing": True}),
    "offload all, bf16 weights": Case({"offload": "all", "activation_checkpointing": True, **BF16}),
    "shared rows": Case({"sequence_parallel": 2}, (1, 2048)),
    "shared rows, recomputed": Case(
        {"sequence_parallel": 2, "activation_checkpointing": True}, (2, 1024)
    ),
}
CASES = {1: ALONE, 2: SHARDED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    for name, layers in (("model", NARROW["num_hidden_layers"]), ("warm", 1)):
        config = Qwen3Config(**{**NARROW, "num_hidden_layers": layers})
        AutoModelForCausalLM.from_config(config).save_pretrained(path / name)
    return path


def measured(folder: Path, world: int, name: str) -> dict[str, int]:
    case = CASES[world][name]
    lines = {name: ("model", case.trainer, case.rows)}
    (folder / "cases.json").write_text(json.dumps(lines), encoding="utf-8")
    program = [str(TESTS / "programs/memory_rank.py")]
    see_through(launch(folder, world, program, method="spawn"))
    ranks = [json.loads((folder / f"{name}.{rank}.json").read_bytes()) for rank in range(world)]
    return {key: max(one[key] for one in ranks) for key in ranks[0]}


def told(folder: Path, world: int, case: Case) -> dict[str, int]:
    count, width = case.rows
    keys = {
        "model.path": str(folder / "model"),
        "generator.max_context": width + 1,
        "checkpoint.every": 0,
        "trainer.device": "cpu",
        "trainer.ranks": world,
        "trainer.pack_tokens": width,
        "trainer.micro_tokens": count * width,
        **{f"trainer.{key}": value for key, value in case.trainer.items()},
    }
    texts = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in keys.items()]
    config = load_config(overrides=texts, environ={})
    model = Qwen3Config(**NARROW)
    sizes = sizes_of(model, count_of(model, config.trainer))
    (rank, *_) = needs(config, sizes, gpu=0, host=1 << 34)
    items = [item for item in rank.host if item.name != "process"]
    training = max(_at(items, phase) for phase in PASS)
    return {"loading": _at(items, LOADING), "training": training}


def _at(items: list[Item], phase: str) -> int:
    return sum(item.bytes for item in items if phase in item.during)


# The others take minutes: make test-real.
ALWAYS = {(2, "bf16")}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=() if (world, name) in ALWAYS else pytest.mark.real)
        for world, cases in CASES.items()
        for name in cases
    ],
)
def test_a_rank_takes_what_it_is_told_to_need(world: int, name: str, folder: Path) -> None:
    expected = told(folder, world, CASES[world][name])
    found = measured(folder, world, name)
    for when in ("training", "loading"):
        least = 0.95 * (found[when] - OBJECTS)
        assert least <= expected[when] <= MOST * found[when], when
