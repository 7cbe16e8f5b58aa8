"""Updates of each recipe on a GPU that is not there, in a process of their own.

The models have the widths of real ones and few layers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # of tensors without numbers
from accelerate.state import AcceleratorState
from fakes.fake_gpu import fake_gpu
from fakes.rank_bench import as_text, make_batches
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from umbra.services.config.loader import load_config
from umbra.services.modeling import scorer
from umbra.services.modeling.lora import adapter_facts
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.critic import open_critic
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.mismatch import MismatchCheck, bound_of
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.trainer.update import PolicyUpdate
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.memory import private_memory

WIDTHS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
DENSE = Qwen3Config(**WIDTHS)
MIXTURE = Qwen3MoeConfig(
    **WIDTHS,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=768,
    decoder_sparse_step=1,
)
RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32 weights": (DENSE, {}),
    "bf16 weights": (DENSE, {"weights": "bf16"}),
    "recomputed": (DENSE, {"weights": "bf16", "activation_checkpointing": True}),
    "selective": (DENSE, {"activation_checkpointing": "selective"}),
    "moments on the host": (DENSE, {"weights": "bf16", "offload": "optimizer"}),
    "LoRA": (DENSE, {"lora_rank": 16}),
    "LoRA alone": (DENSE, {"lora_rank": 16, "lora_publish": "adapter"}),
    "experts": (MIXTURE, {"router_aux_loss_coef": 0.01}),
    "experts, LoRA": (MIXTURE, {"lora_rank": 16}),
    "minibatches": (DENSE, {"minibatches": 2}),
    "critic": (DENSE, {"objective": "ppo_critic"}),
    "served in fp8": (DENSE, {}),
    "experts served in fp8": (MIXTURE, {"router_aux_loss_coef": 0.01}),
    "masks": (DENSE, {"score_centering": 2}),
    "sharded": (DENSE, {"ranks": 2}),
    "sharded, recomputed": (DENSE, {"ranks": 2, "activation_checkpointing": True}),
    "sharded experts": (MIXTURE, {"ranks": 2}),
}

FP8 = (
    "generator.engine=vllm",
    "generator.engine_args.quantization=fp8",
    "trainer.max_mismatch=2",  # more than there is: numbers that are not there disagree
)


def ranks(world: int) -> Ranks:
    """The first of so many, none of which is there."""
    if world == 1:
        return Ranks()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return Ranks(0, world, 60.0)


def run(recipe: str, folder: Path) -> dict[str, Any]:
    """Make an update and write the version; return what there was of it."""
    if not (folder / "config.json").exists():
        make_model(folder, hidden=64, ff=128)  # for a critic
    architecture, keys = RECIPES[recipe]
    overrides = [f"trainer.{key}={as_text(value)}" for key, value in keys.items()]
    overrides += FP8 if "fp8" in recipe else ()
    config = load_config(
        overrides=[*overrides, "trainer.device=cuda", "run.steps=2", f"model.path={folder}"],
        environ={},
    )
    trainer = config.trainer
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with fake_gpu() as gpu:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(architecture, attn_implementation="sdpa")
            learner = Learner(model.eval(), trainer, 2, ranks(trainer.ranks))
            critic = open_critic(config, learner)
            if critic is not None:
                critic._thread = None  # in which it would be a torch without a GPU
            mismatch = MismatchCheck(config, learner) if "fp8" in recipe else None
            update = PolicyUpdate(config, learner, critic, mismatch)
            batch = make_batch(make_batches(1)[0], architecture.vocab_size)
            gpu.products.clear()
            scorer._APART = math.inf  # numbers that are not there seem to differ
            learner.logprobs(learner.pack(batch.tokens), batch.temperature)
            row = update(batch, 0, lambda: True)
            products = {str(dtype): count for dtype, count in gpu.products.items()}
            adapter = adapter_facts(trainer, "")
            layout = tensor_layout(learner.model, "bfloat16", adapter=adapter is not None)
            manifest = build_manifest(layout, 4 << 20, adapter=adapter)
            slot = private_memory(manifest.total_bytes)
            written = write_shards(learner.model, manifest, slot, world=trainer.ranks)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    embedding = architecture.vocab_size * architecture.hidden_size * 4
    return {
        "device": str(learner.device),
        "elsewhere": [n for n, t in learner.model.state_dict().items() if not t.is_cuda],
        "updates": row and row["updates"],
        "products": products,
        "written": written,
        "copied": gpu.written,
        "version": sum(entry.nbytes for entry in manifest.tensors),
        "ranks": trainer.ranks,
        "published": sorted({entry.dtype for entry in manifest.tensors}),
        "agreement": bound_of(config, learner.device.type)[1],
        "compared": row and row.get("mismatch/compared"),
        "largest": gpu.largest,
        "bound": max(embedding, trainer.logits_bytes_on("cuda")),
    }
