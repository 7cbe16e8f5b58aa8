"""How many bytes the processes of a run need, on GPUs and in host memory; arithmetic only.

What depends on the model's class comes in as numbers (`ModelSizes`, `PassPeaks`), so nothing here
needs torch. A run is taken to be on one host, as `umbra up` starts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from umbra.deploy.check.items import (
    AFTER_LOADING,
    CONTEXT,
    GPU_PROCESS,
    ITEM_BYTES,
    LOADING,
    PROCESS,
    VLLM_WORK,
    Facts,
    Item,
    ModelSizes,
    Need,
    RowShape,
    first_gpu,
    kind_of,
)
from umbra.deploy.check.rank import trainer_need
from umbra.services.config import RunConfig


def fullest(config: RunConfig) -> list[RowShape]:
    """The micro-batches that may need most of those that `packing.pack` makes.

    The longest sample fills a context, of which the last token is not fed. A sample that is longer
    than `trainer.pack_tokens` (a number here, not "auto") has a row alone; among the rows of a
    micro-batch, which are padded to the longest, there may be packed ones if they have half its
    width.
    """
    trainer = config.trainer
    longest = max(1, config.generator.max_context - 1)
    width, together = trainer.pack_tokens, trainer.micro_tokens
    assert width != "auto" and together != "auto"
    if longest > width:
        width = min(longest, 2 * width - 1)
    found = [*_filled(together, width, packed=True)]
    if longest > width:
        found += _filled(together, longest, packed=False)
    return found


def _filled(tokens: int, width: int, *, packed: bool) -> Iterator[RowShape]:
    """Yield rows as wide as can be for so many `tokens`, and narrower ones if some are left."""
    yield RowShape(max(1, tokens // width), width, packed)
    if width < tokens and tokens % width:
        count = -(-tokens // width)
        yield RowShape(count, tokens // count, packed)


def needs(config: RunConfig, facts: Facts, *, gpu: bool) -> list[Need]:
    """Return the needs of each kind of process of a run, on a machine with or without GPUs."""
    return [
        trainer_need(config, facts, gpu=gpu),
        _generator(config, facts, gpu=gpu),
        *_scorers(config, facts, gpu=gpu),
    ]


def published(config: RunConfig, sizes: ModelSizes, *, gpu: bool) -> int:
    """Return the bytes of a version: the weights, or an adapter published by itself."""
    kind = kind_of(config.trainer.device, gpu=gpu)
    alone = config.trainer.lora_publish == "adapter"
    numbers = sizes.adapter if alone else sizes.parameters
    return numbers * ITEM_BYTES[config.weight_hub.dtype_on(kind)]


def arena(config: RunConfig, sizes: ModelSizes, *, gpu: bool) -> Item:
    slots = config.weight_hub.slots
    size = slots * published(config, sizes, gpu=gpu)
    return Item(f"arena, {slots} versions", size, AFTER_LOADING, "set weight_hub.slots = 2")


def _generator(config: RunConfig, facts: Facts, *, gpu: bool) -> Need:
    generator, sizes = config.generator, facts.sizes
    kind = kind_of(generator.device, gpu=gpu)
    dtype = config.weight_hub.dtype_on(kind)
    each, parallel = ITEM_BYTES[dtype], generator.tensor_parallel
    arguments = generator.engine_args
    version = sizes.parameters * each
    cached = 1 if "fp8" in str(arguments.get("kv_cache_dtype", "")) else each
    tokens = generator.slots * generator.max_context
    weights = version // 2 if arguments.get("quantization") else version
    more = "raise generator.tensor_parallel"
    cache = Item(
        f"KV cache, {generator.slots} x {generator.max_context:,} tokens",
        cached * sizes.kv_numbers * tokens // parallel,
        remedy="lower generator.slots or generator.max_context",
    )
    if given := arguments.get("kv_cache_memory_bytes"):
        remedy = "lower generator.engine_args.kv_cache_memory_bytes"
        cache = Item("KV cache", int(given), remedy=remedy)
    device = [Item(f"weights, {dtype}", weights // parallel, remedy=more), cache]
    if config.trainer.lora_publish == "adapter":
        device.append(Item("adapter", sizes.adapter * each))
    sampled = 4 * 4 * generator.slots * sizes.vocabulary  # logits, their softmax, sorted, drawn
    if generator.engine == "vllm":
        device.append(Item("vLLM's passes and graphs", VLLM_WORK))
    else:
        device.append(Item("prefill", facts.prefill.peak))
        device.append(Item("sampling", sampled, remedy="lower generator.slots"))
    host = [Item("process", GPU_PROCESS if kind == "cuda" else PROCESS)]
    if generator.engine == "torch" and kind == "cuda":
        host.append(Item("the whole model while it is read", version, (LOADING,)))
    host.append(Item("staging of a version", published(config, sizes, gpu=gpu), AFTER_LOADING))
    count = generator.count
    if kind != "cuda":
        return Need("generator", (), (), (*host, *device), count)
    device.append(Item("CUDA and NCCL", CONTEXT))
    first = first_gpu(generator.device)
    own = parallel if ":" in generator.device else 0  # device "cuda": all share the first one
    starts = [first + own * index for index in range(count)]
    gpus = tuple(tuple(range(start, start + parallel)) for start in starts)
    return Need("generator", gpus, tuple(device), tuple(host), count)


def _scorers(config: RunConfig, facts: Facts, *, gpu: bool) -> Iterator[Need]:
    kind = kind_of(config.scorer.device, gpu=gpu)
    each = ITEM_BYTES[config.weight_hub.dtype_on(kind)]
    version = facts.sizes.parameters * each
    for stage in ("ref_logp", "logp"):
        count: Any = getattr(config.scorer, stage)
        if stage not in config.buffer.stages or not count:
            continue
        work = facts.scoring.peak
        device = [
            Item("weights", version),
            Item("forward pass", work, remedy="lower trainer.micro_tokens"),
        ]
        host = [Item("process", GPU_PROCESS if kind == "cuda" else PROCESS)]
        if kind == "cuda":
            host.append(Item("the whole model while it is read", version, (LOADING,)))
        if stage == "logp":
            staged = published(config, facts.sizes, gpu=gpu)
            host.append(Item("staging of a version", staged, AFTER_LOADING))
        name = f"scorer {stage}"
        if kind == "cuda":
            gpus = ((first_gpu(config.scorer.device),),) * count
            items = (*device, Item("CUDA and NCCL", CONTEXT))
            yield Need(name, gpus, items, tuple(host), count)
        else:
            yield Need(name, (), (), (*host, *device), count)
