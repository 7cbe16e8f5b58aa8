"""A policy with an adapter, and versions of it as its trainer publishes them."""

from __future__ import annotations

from pathlib import Path

import torch

from umbra.proto.records import Manifest
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.modeling.lora import adapter_facts, factors
from umbra.services.modeling.model_directory import weights_checksum
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest, check_manifest
from umbra.services.weights.memory import shared_memory

BUCKET_BYTES = 4096


def config_of(directory: Path, *more: str) -> RunConfig:
    return load_config(
        overrides=[
            f"model.path={directory}",
            "trainer.device=cpu",
            "trainer.lora_rank=4",
            "trainer.lora_alpha=6",
            "trainer.lora_publish=adapter",
            "generator.device=cpu",
            "generator.threads=1",
            "generator.slots=4",
            "generator.max_context=128",
            *more,
        ],
        environ={},
    )


@torch.no_grad()
def trained(config: RunConfig, seed: int) -> Learner:
    """A policy whose adapter has left its zero."""
    learner = Learner(load_policy(config.model.path)[0], config.trainer, steps=1)
    source = torch.Generator().manual_seed(seed)
    for factor in factors(learner.model).values():
        factor.copy_(0.3 * torch.randn(factor.shape, generator=source))
    return learner


def publish(
    learner: Learner, config: RunConfig, dtype: str = "float32"
) -> tuple[Manifest, memoryview]:
    """As `trainer.service` does it."""
    adapter = adapter_facts(config.trainer, weights_checksum(config.model.path))
    layout = tensor_layout(learner.model, dtype, adapter=adapter is not None)
    manifest = build_manifest(layout, BUCKET_BYTES, adapter=adapter)
    check_manifest(manifest)
    slot = shared_memory(manifest.total_bytes)
    write_shards(learner.model, manifest, slot)
    return manifest, slot
