"""How many bytes the processes of a run need, on GPUs and in host memory; arithmetic only.

What depends on the model's class comes in as numbers (`ModelSizes`, `PassPeaks`), so nothing here
needs torch. A run is taken to be on one host, as `umbra up` starts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from umbra.deploy.estimate.gpus import GIB
from umbra.deploy.estimate.sizes import ModelSizes, PassPeaks, RowShape
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.weights.staging import BUFFERS

LOADING, LOGITS, BACKWARD, EXPORT = "loading", "logits", "backward", "export"
TRAINING = (LOGITS, BACKWARD)
PHASES = (LOADING, LOGITS, BACKWARD, EXPORT)
AFTER_LOADING = (LOGITS, BACKWARD, EXPORT)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COMPUTE_BYTES = {"no": 4, "bf16": 2, "fp16": 2}
PROCESS = int(0.6 * GIB)  # Python with torch and Transformers
GPU_PROCESS = 2 * GIB  # the same with CUDA's libraries
CONTEXT = 1 * GIB  # of a GPU: CUDA's context, cuBLAS, and NCCL's buffers
VLLM_SHARE = 0.92  # vLLM 0.32's gpu_memory_utilization
VLLM_WORK = 3 * GIB  # of it: CUDA graphs, and the pass that it profiles


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes for one purpose.

    Attributes:
        during: the phases in which they are there; a process needs the most of any phase.
        remedy: what a user can change to need less, as the end of "...: ".
    """

    name: str
    bytes: int
    during: tuple[str, ...] = PHASES
    remedy: str = ""


def peak(items: Iterable[Item]) -> int:
    """The most that `items` take together in any phase."""
    items = list(items)
    return max(sum(item.bytes for item in items if phase in item.during) for phase in PHASES)


@dataclass(frozen=True, slots=True)
class Need:
    """What each of `count` like processes needs.

    Attributes:
        gpus: indices of the GPUs of each; empty on a CPU.
        device: memory of each of these GPUs.
        host: memory of the host.
    """

    name: str
    gpus: tuple[tuple[int, ...], ...]
    device: tuple[Item, ...]
    host: tuple[Item, ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the model, and of the passes that the run makes over it.

    Attributes:
        training: a trainer's forward and backward pass over its fullest micro-batch.
        scoring: a forward pass of a scorer of logprobs.
        prefill: a forward pass of the torch engine over prompts.
        rows: of that micro-batch.
    """

    sizes: ModelSizes
    training: PassPeaks
    scoring: PassPeaks
    prefill: PassPeaks
    rows: RowShape


def kind_of(device: str, *, gpu: bool) -> str:
    """ "cuda" or "cpu": what a configured device name means on a machine with or without GPUs."""
    name = device.partition(":")[0]
    return ("cuda" if gpu else "cpu") if name == "auto" else name


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
    """So many `tokens` in rows as wide as can be, and in narrower ones if those leave some out."""
    yield RowShape(max(1, tokens // width), width, packed)
    if width < tokens and tokens % width:
        count = -(-tokens // width)
        yield RowShape(count, tokens // count, packed)


def needs(config: RunConfig, facts: Facts, *, gpu: bool) -> list[Need]:
    """Of each kind of process of a run that needs much, on a machine with or without GPUs."""
    found = [_trainer(config, facts, gpu=gpu)]
    if config.generator.engine != "replay":
        found.append(_generator(config, facts, gpu=gpu))
    found += _scorers(config, facts, gpu=gpu)
    return found


def published(config: RunConfig, sizes: ModelSizes, *, gpu: bool) -> int:
    """Bytes of a version: the weights, or an adapter that is published by itself."""
    kind = kind_of(config.trainer.device, gpu=gpu)
    alone = config.trainer.lora_publish == "adapter"
    numbers = sizes.adapter if alone else sizes.parameters
    return numbers * ITEM_BYTES[config.weight_hub.dtype_on(kind)]


def arena(config: RunConfig, sizes: ModelSizes, *, gpu: bool) -> Item:
    """The weight hub's slots in /dev/shm."""
    slots = config.weight_hub.slots
    size = slots * published(config, sizes, gpu=gpu)
    return Item(f"arena, {slots} versions", size, AFTER_LOADING, "set weight_hub.slots = 2")


def _trainer(config: RunConfig, facts: Facts, *, gpu: bool) -> Need:
    trainer, sizes = config.trainer, facts.sizes
    ranks = trainer.ranks
    kind = kind_of(trainer.device, gpu=gpu)
    share, trained = sizes.share(ranks), sizes.share(ranks, trained=True)
    # Muon keeps 4 bytes of a matrix, and 8 of what AdamW trains: at most as much as AdamW.
    most = 8 * trained
    moments = {"adamw": most, "muon": most, "sgd": 4 * trained if trainer.betas[0] else 0}
    moments_bytes = moments[trainer.optimizer]
    shard = "raise trainer.ranks, or train an adapter (trainer.lora_rank)"
    device = [
        Item("weights, float32", 4 * share, remedy=shard),
        Item("gradients, float32", 4 * trained, AFTER_LOADING, shard),
        Item(f"moments, {trainer.optimizer}", moments_bytes, AFTER_LOADING, shard),
        *_gathered(config, sizes, kind),
        *_passes(config, facts, kind),
    ]
    if config.trainer.pieces.advantage == "gae" and config.critic.kind == "model":
        # The critic's passes and the policy's may be under way at the same time.
        critic = [replace(item, name=f"critic: {item.name}") for item in device]
        device += [item for item in critic if item.bytes]
    state = 4 * trained + moments_bytes
    largest = max(tensor.share(ranks) for tensor in sizes.tensors)
    host = [Item("process", GPU_PROCESS if kind == "cuda" else PROCESS)]
    # A rank reads its rows of one tensor at a time.
    host.append(Item("rows of a tensor while it is read", 4 * largest, (LOADING,)))
    if config.checkpoint.every:
        host.append(Item("copy for checkpoints", state, AFTER_LOADING, "set checkpoint.every = 0"))
    if trainer.mismatch_every and config.buffer.run_ahead and config.generator.engine != "replay":
        host.append(
            Item("weights kept aside", 4 * trained, TRAINING, "set trainer.mismatch_every = 0")
        )
    if kind == "cuda" or ranks > 1 or trainer.lora_rank:
        whole = 4 * sizes.parameters // ranks  # which rank 0 has for all of them
        host.append(Item("the whole model for the export, per rank", whole, (EXPORT,)))
    if kind == "cuda":
        first = _index(trainer.device)
        device.append(Item("CUDA and NCCL", CONTEXT))
        gpus = tuple((first + rank,) for rank in range(ranks))
        return Need("trainer rank", gpus, tuple(device), tuple(host), ranks)
    return Need("trainer rank", (), (), (*host, *device), ranks)


def _gathered(config: RunConfig, sizes: ModelSizes, kind: str) -> Iterator[Item]:
    """What FSDP2 has of parameters and gradients that are not shards.

    The root's parameters stay gathered for a pass. Of layers there are the one at work, the buffer
    that the next one is gathered into, and on GPUs the next one itself. A layer's gradients are
    reduced in float32, from a buffer that lives until those of the next one are reduced.
    """
    if config.trainer.ranks == 1:
        return
    each = COMPUTE_BYTES[config.trainer.precision_on(kind)]
    root, root_trained = sizes.root
    layer, trained = sizes.largest_layer
    layers = 3 if kind == "cuda" else 2
    remedy = "there is no key for it; a GPU with more memory"
    yield Item("gathered parameters", each * (root + layers * layer), TRAINING, remedy)
    reduced = trained * (each + 8)
    last = root_trained * 4
    yield Item("gathered gradients", each * root_trained + max(reduced, last), (BACKWARD,), remedy)


def _passes(config: RunConfig, facts: Facts, kind: str) -> Iterator[Item]:
    """What a forward and a backward pass take beyond parameters and gradients."""
    training, trainer = facts.training, config.trainer
    rows = facts.rows
    less = "lower trainer.micro_tokens"
    if not trainer.recomputes_on(kind):
        less = "set trainer.activation_checkpointing = true"
    elif rows.count == 1:
        less = "lower generator.max_context or trainer.pack_tokens"
    yield Item(
        f"activations, {rows.count} x {rows.width:,} tokens",
        training.kept - training.attention,
        TRAINING,
        less,
    )
    yield Item("masks and scores", training.attention, TRAINING, "lower trainer.pack_tokens")
    yield Item("logits", training.logits, (LOGITS,), "lower trainer.logits_mib")
    yield Item("a layer's forward and backward pass", training.working, (BACKWARD,), less)


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
    if generator.receive == "staged":
        staged = BUFFERS * published(config, sizes, gpu=gpu)
        remedy = "set generator.receive = streamed"
        host.append(Item("staging of a version", staged, AFTER_LOADING, remedy))
    count = generator.count * generator.replicas
    if kind != "cuda":
        return Need("generator", (), (), (*host, *device), count)
    device.append(Item("CUDA and NCCL", CONTEXT))
    first = _index(generator.device)
    starts = [first + parallel * replica for replica in range(generator.replicas)]
    gpus = tuple(tuple(range(start, start + parallel)) for start in starts) * generator.count
    return Need("generator", gpus, tuple(device), tuple(host), count)


def _scorers(config: RunConfig, facts: Facts, *, gpu: bool) -> Iterator[Need]:
    """Those that have a model: reference and proximal logprobs."""
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
            Item("forward pass", work, remedy="lower scorer.micro_tokens or scorer.logits_mib"),
        ]
        host = [Item("process", GPU_PROCESS if kind == "cuda" else PROCESS)]
        if kind == "cuda":
            host.append(Item("the whole model while it is read", version, (LOADING,)))
        if stage == "logp":
            staged = BUFFERS * published(config, facts.sizes, gpu=gpu)
            host.append(Item("staging of a version", staged, AFTER_LOADING))
        name = f"scorer {stage}"
        if kind == "cuda":
            gpus = ((_index(config.scorer.device),),) * count
            items = (*device, Item("CUDA and NCCL", CONTEXT))
            yield Need(name, gpus, items, tuple(host), count)
        else:
            yield Need(name, (), (), (*host, *device), count)


def _index(device: str) -> int:
    number = device.partition(":")[2]
    return int(number) if number.isdigit() else 0
