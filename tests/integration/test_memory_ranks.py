"""`umbra check`: what a trainer's rank takes is what it is told to need, by every key of memory.

Ranks load a model and train, in processes of their own; the kernel tells what that took.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from fakes.full_rows import RowShape, full_rows
from fakes.rank_bench import configured
from fakes.rank_processes import on_ranks
from programs.memory_peak import begin, give_back_what_is_freed, status
from transformers import AutoModelForCausalLM, Qwen3Config

from umbra.deploy.check.aside import count_of
from umbra.deploy.check.estimate import LOADING, PASS, needs
from umbra.deploy.check.model_sizes import sizes_of
from umbra.services.config import TrainerConfig
from umbra.services.modeling.models import open_weights
from umbra.services.trainer.distributed.ranks import join_ranks
from umbra.services.trainer.learner import Learner

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
BF16 = {"precision": "bf16", "weights": "bf16"}
RECOMPUTED = {"activation_checkpointing": True}
OFFLOAD = {"offload": "all", **RECOMPUTED}
# Ranks, settings of the trainer, and the rows of its fullest micro-batch.
CASES: dict[str, tuple[int, dict[str, Any], RowShape]] = {
    "float32": (1, {}, RowShape(2, 256)),
    "bf16 weights": (1, BF16, RowShape(2, 256)),
    "offload all": (1, OFFLOAD, RowShape(4, 512)),
    "adapter of a bf16 base": (1, {"lora_rank": 8, **BF16}, RowShape(2, 256)),
    "sharded, bf16": (2, {"precision": "bf16"}, RowShape(2, 256)),
    "sharded, host optimizer": (2, {"offload": "optimizer"}, RowShape(2, 256)),
    "sharded, offload all, bf16 weights": (2, {**OFFLOAD, **BF16}, RowShape(2, 256)),
    "shared rows": (2, {"sequence_parallel": 2, **RECOMPUTED}, RowShape(2, 1024)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    for name, layers in (("model", NARROW["num_hidden_layers"]), ("warm", 1)):
        config = Qwen3Config(**{**NARROW, "num_hidden_layers": layers})
        AutoModelForCausalLM.from_config(config).save_pretrained(path / name)
    return path


def measure(folder: Path, trainer: dict[str, Any], rows: RowShape) -> dict[str, int]:
    """As one of several ranks, return how much the resident set grew in bytes, by the kernel, while
    a model is loaded by rows, and in two updates of two full micro-batches each.
    """
    give_back_what_is_freed()
    torch.set_num_threads(1)
    found: dict[str, int] = {}
    config = TrainerConfig(device="cpu", threads=1, **trainer)
    with join_ranks(config) as ranks:
        # Libraries make their own buffers at the first time, and oneDNN code for each shape.
        for name in ("warm", "model"):
            AcceleratorState._reset_state()
            micro, before = full_rows(rows), begin()
            model, files = open_weights(AutoModelForCausalLM, folder / name, "model.path")
            learner = Learner(model, config, 1, ranks, files=files)
            found["loading"] = status("VmHWM") - before
            begin()
            for step in range(2):
                for _ in range(2):
                    ones = torch.ones(len(micro.targets))
                    logprobs, _ = learner.score(micro, ones, with_entropy=True)
                    learner.backward(logprobs.sum())
                    del logprobs
                learner.update(step)
            found["training"] = status("VmHWM") - before
            del model, files, learner
    return found


def told(folder: Path, world: int, trainer: dict[str, Any], rows: RowShape) -> dict[str, int]:
    keys = {
        "generator.max_context": rows.width + 1,
        "checkpoint.every": 0,
        "device": "cpu",
        "ranks": world,
        "pack_tokens": rows.width,
        "micro_tokens": rows.number * rows.width,
    }
    config = configured(folder / "model", **keys, **trainer)
    model = Qwen3Config(**NARROW)
    (rank, *_) = needs(
        config, sizes_of(model, count_of(model, config.trainer)), gpu=0, host=1 << 34
    )
    items = [item for item in rank.host if item.name != "process"]
    at = {phase: sum(i.bytes for i in items if phase in i.during) for phase in (LOADING, *PASS)}
    return {"loading": at[LOADING], "training": max(at[phase] for phase in PASS)}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [  # the others take minutes: make test-real
        pytest.param(name, marks=() if name == "sharded, bf16" else pytest.mark.real)
        for name in CASES
    ],
)
def test_a_rank_takes_what_it_is_told_to_need(name: str, folder: Path) -> None:
    world, trainer, rows = CASES[name]
    expected = told(folder, world, trainer, rows)
    ranks = on_ranks(folder, world, measure, folder, trainer, rows, method="spawn")
    for when in ("training", "loading"):
        found = max(one[when] for one in ranks)
        assert 0.95 * (found - OBJECTS) <= expected[when] <= MOST * found, when
