"""Estimate of a run's memory on one host, in bytes; docs/models.md.

`needs` has each process's on its GPU and host (the kernel measures at most 5 % more in tests), and
`Estimate` the margin, and the key to lower if it does not fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from umbra.deploy.check.machine import GIB, Machine, first_gpu, kind_of
from umbra.deploy.check.model_sizes import ModelSizes, read_sizes
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.modeling import row_sizes
from umbra.services.process.host import host_bytes
from umbra.services.reporting import size
from umbra.services.weights.planes.plane import GPU_PLANES

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "no": 4, "bf16": 2}
# When an item is there, if not always: the backward pass begins at the logits and the last layer,
# with all activations, and ends at the first layer, with all gradients.
LOADING, LOGITS, LAST, FIRST, EXPORT = PHASES = (
    "loading", "logits", "last layer", "first layer", "export",
)  # fmt: skip
PASS = (LOGITS, LAST, FIRST)
LOADED = (*PASS, EXPORT)
PROCESS, GPU_PROCESS = int(0.6 * GIB), 2 * GIB  # Python with torch; the same with CUDA's libraries
CONTEXT = 1 * GIB  # of a GPU: CUDA's context, cuBLAS, and NCCL's buffers
VLLM_WORK = 3 * GIB  # CUDA graphs, and the pass that vLLM profiles
UNKNOWN_GPU = 80 * 10**9  # of a GPU that is asked for by name on a machine without any
MASK = 5  # bytes of a pair of positions in a dense mask, and in tensors made of it
SHARD = "raise trainer.ranks, or train an adapter (trainer.lora_rank)"
SLOTS = "lower generator.slots"
NO_KEY = "there is no key for it; a GPU with more memory"


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes for one purpose in the phases `during`; `remedy` is what a user can change."""

    name: str
    bytes: int
    during: tuple[str, ...] = PHASES
    remedy: str = ""


def taken(items: Collection[Item], phase: str) -> int:
    return sum(item.bytes for item in items if phase in item.during)


def fullest_phase(items: Collection[Item]) -> str:
    return max(PHASES, key=lambda phase: taken(items, phase))


def peak(items: Collection[Item]) -> int:
    """Return the most that `items` take together in any phase."""
    return taken(items, fullest_phase(items))


@dataclass(frozen=True, slots=True)
class Need:
    """Needs of each of `count` like processes on its `gpus` and on the host."""

    name: str
    gpus: tuple[tuple[int, ...], ...]
    device: tuple[Item, ...]
    host: tuple[Item, ...]
    count: int


def needs(config: RunConfig, sizes: ModelSizes, *, gpu: int, host: int | None) -> list[Need]:
    """Return the needs of each kind of process.

    `gpu` is the memory of a GPU in bytes, 0 without any; `host` the host's, None this machine's.
    """
    generator = _generator(config, sizes, gpu=gpu > 0)
    return [
        _trainer(config, sizes, gpu, host),
        generator,
        *_scorers(config, sizes, gpu, host),
        *_planes(config, published(config, sizes, gpu=gpu > 0), generator.gpus),
    ]


def _need(name: str, gpus: Any, device: list[Item], host: list[Item], count: int) -> Need:
    """Return a need; without GPUs all of it is memory of the host."""
    if not gpus:
        return Need(name, (), (), (Item("process", PROCESS), *host, *device), count)
    device = [*device, Item("CUDA and NCCL", CONTEXT)]
    return Need(name, gpus, tuple(device), (Item("process", GPU_PROCESS), *host), count)


def _memory(kind: str, gpu: int, host: int | None, processes: int = 1) -> int:
    if kind == "cuda":
        return gpu or UNKNOWN_GPU
    return (host_bytes() if host is None else host) // processes


def _trainer(config: RunConfig, sizes: ModelSizes, gpu: int, host_memory: int | None) -> Need:
    trainer, ranks = config.trainer, config.trainer.ranks
    kind = kind_of(trainer.device, gpu=gpu > 0)
    memory = _memory(kind, gpu, host_memory, ranks)
    fits = row_sizes.fitting_tokens(trainer, sizes.config, sizes.parameters // ranks, memory, kind)
    rows = row_sizes.rows_within(trainer, sizes.config, fits, kind, config.longest_turn)
    shape = fullest(*rows, config.generator.max_context)
    device, host = _rank(trainer, sizes, kind, *shape)
    if trainer.pieces.needs_critic:
        # Its passes and the policy's may be under way at the same time. It is float32, and on the
        # host only where FSDP puts it there.
        offload = trainer.offload if ranks > 1 and trainer.offload != "optimizer" else "none"
        critic = msgspec.structs.replace(
            trainer, weights="float32", optimizer="adamw", offload=offload
        )
        own = _rank(critic, sizes, kind, *shape)
        for place, items in zip((device, host), own, strict=True):
            place += [replace(item, name=f"critic: {item.name}") for item in items]
    trained, largest = sizes.trained // ranks, max(sizes.largest, sizes.layer[0]) // ranks
    host.append(Item("rows of a layer while it is read", 4 * largest, (LOADING,)))
    if config.checkpoint.every:
        state = 4 * trained + moments(trainer, sizes)
        host.append(Item("copy for checkpoints", state, LOADED, "set checkpoint.every = 0"))
    if trainer.mismatch_every and config.buffer.run_ahead:
        copy = ITEM_BYTES[trainer.weights] * trained
        host.append(Item("weights kept aside", copy, PASS, "set buffer.run_ahead = 0"))
    if kind == "cuda" or ranks > 1 or trainer.lora_rank:
        model = 4 * sizes.parameters // ranks  # which rank 0 has for all of them
        host.append(Item("the whole model for the export, per rank", model, (EXPORT,)))
    first = first_gpu(trainer.device)
    gpus = tuple((first + rank,) for rank in range(ranks)) if kind == "cuda" else ()
    return _need("trainer rank", gpus, device, host, ranks)


def fullest(pack_tokens: int, micro_tokens: int, max_context: int) -> tuple[int, int]:
    """Return tokens and row width of the micro-batch that needs most of those `packing.pack` makes.

    A sample longer than `pack_tokens` has a row alone, and packed rows may be padded to it.
    """
    longest = max(1, max_context - 1)
    if longest <= pack_tokens:
        return max(micro_tokens, pack_tokens), pack_tokens
    return max(micro_tokens, longest), min(longest, 2 * pack_tokens - 1)


def moments(trainer: TrainerConfig, sizes: ModelSizes) -> int:
    trained = sizes.trained // trainer.ranks
    if trainer.optimizer == "sgd":
        return 4 * trained if trainer.betas[0] else 0
    return 8 * trained


def _rank(
    trainer: TrainerConfig, sizes: ModelSizes, kind: str, tokens: int, width: int
) -> tuple[list[Item], list[Item]]:
    """Return the items of a rank's model on its device, and those in host memory."""
    ranks, itemsize = trainer.ranks, ITEM_BYTES[trainer.weights]
    share = (sizes.parameters + sizes.adapter) // ranks
    trained = sizes.trained // ranks
    rows_on_host = trainer.offload == "all" and ranks > 1
    step_on_host = trainer.offload in ("optimizer", "all")
    dtype = "bfloat16" if itemsize == 2 else "float32"
    rows = [Item(f"weights, {dtype}", itemsize * share, remedy=SHARD)]
    step: list[Item] = []
    if itemsize == 2 or (step_on_host and not rows_on_host):
        # Each micro-batch has gradients of its own, which are added to the copies' gradients.
        step.append(Item("float32 copies", 4 * trained, remedy=SHARD))
        rows.append(Item("gradients of a micro-batch", itemsize * trained, (FIRST,), SHARD))
    step.append(Item("gradients, float32", 4 * trained, LOADED, SHARD))
    step.append(Item(f"moments, {trainer.optimizer}", moments(trainer, sizes), LOADED, SHARD))
    passes, offloaded = _pass(trainer, sizes, kind, tokens, width)
    device = [*(() if rows_on_host else rows), *(() if step_on_host else step), *passes]
    device += _gathered(trainer, sizes, kind) if ranks > 1 else ()
    host = [*(rows if rows_on_host else ()), *(step if step_on_host else ()), *offloaded]
    return device, host


def _gathered(trainer: TrainerConfig, sizes: ModelSizes, kind: str) -> Iterator[Item]:
    """Yield FSDP2's unsharded tensors: all outside of the layers, and a layer at a time.

    On GPUs there are the next layer and its buffer, too. Gradients are summed in float32.
    """
    itemsize = ITEM_BYTES[trainer.precision_on(kind)]
    (outside, outside_trained), (layer, layer_trained) = sizes.outside, sizes.layer
    at_once, ends = (3 if kind == "cuda" else 1), (LAST, FIRST)
    buffers = 4 + 4 // trainer.ranks  # a buffer in float32, and what comes of it
    summed = (itemsize + 4 + buffers) * layer_trained
    yield Item("gathered parameters", itemsize * outside, PASS, NO_KEY)
    yield Item("gathered layers", at_once * itemsize * layer, ends, NO_KEY)
    yield Item("gathered gradients", itemsize * outside_trained, ends, NO_KEY)
    yield Item("a layer's gradients while they are summed", summed, ends, NO_KEY)


def _pass(
    trainer: TrainerConfig, sizes: ModelSizes, kind: str, tokens: int, width: int
) -> tuple[list[Item], list[Item]]:
    """Return the bytes of a forward and backward pass on the device, and moved to the host.

    Autocast, of one rank, keeps the residual stream in float32, and casts of the weights.
    """
    itemsize, layers = ITEM_BYTES[trainer.precision_on(kind)], sizes.layers
    tokens //= trainer.sequence_parallel
    autocast = itemsize == 2 and trainer.weights == "float32" and trainer.ranks == 1
    stream, residual, pairs = 4 if autocast else itemsize, 10 * sizes.hidden, tokens * width
    layer = tokens * (residual * stream + (sizes.activations - residual) * itemsize)
    layer = layer * 21 // 20  # tensors not in `layer_numbers`
    scores = (sizes.scores * itemsize + 2) * pairs if sizes.scores else 0
    recompute = trainer.recomputes_on(kind)
    recomputed = layers if recompute is True else 0  # "selective" keeps as much as none
    inputs, layers_kept = recomputed * tokens * sizes.hidden * stream, layers - recomputed
    offload = inputs if trainer.offload == "all" and kind == "cuda" else 0
    activations = inputs - offload + layers_kept * layer
    if autocast:
        activations += 2 * (sizes.layer[0] * layers + sizes.outside[0])
    masks = (MASK * pairs if kind == "cpu" else 0) + layers_kept * scores
    chunk = min(4 * tokens * sizes.vocabulary, trainer.logits_bytes_on(kind))
    head = sizes.vocabulary * sizes.hidden if sizes.outside[1] else 0
    shape = f"{tokens:,} tokens in rows of {width:,}"
    remedy = "lower trainer.micro_tokens"
    if not recompute:
        remedy = "set trainer.activation_checkpointing = true"
    elif tokens <= width:
        remedy = "lower generator.max_context or trainer.pack_tokens"
    full = (LOGITS, LAST)
    device = [
        Item(f"activations, {shape}", activations, full, remedy),
        Item("masks and scores", masks, full, "lower trainer.pack_tokens"),
        Item("logits", 4 * chunk + 6 * head, (LOGITS,), NO_KEY),
        Item("a layer's forward and backward pass", layer + scores, (LAST, FIRST), remedy),
    ]
    return device, [Item(f"activations, {shape}", offload, full, remedy)] if offload else []


def published(config: RunConfig, sizes: ModelSizes, *, gpu: bool) -> int:
    """Return the bytes of a version: the weights, or an adapter published by itself."""
    adapter_only = config.trainer.lora_publish == "adapter"
    numbers = sizes.adapter if adapter_only else sizes.parameters
    return numbers * _itemsize(config, config.trainer.device, gpu)


def _itemsize(config: RunConfig, device: str, gpu: bool) -> int:
    return ITEM_BYTES[config.weight_hub.dtype_on(kind_of(device, gpu=gpu))]


def _forward(sizes: ModelSizes, tokens: int, width: int, itemsize: int, kind: str) -> int:
    """Return the bytes of a pass without gradients, of one layer at a time."""
    scores = sizes.scores * itemsize + (MASK if kind == "cpu" else 0)
    return tokens * (itemsize * sizes.activations + width * scores)


def _generator(config: RunConfig, sizes: ModelSizes, *, gpu: bool) -> Need:
    generator, parallel = config.generator, config.generator.tensor_parallel
    kind = kind_of(generator.device, gpu=gpu)
    itemsize, arguments = _itemsize(config, generator.device, gpu), generator.engine_args
    slots, context, vllm = generator.slots, generator.max_context, generator.engine == "vllm"
    version = sizes.parameters * itemsize
    weights = version // 2 if arguments.get("quantization") else version
    name, remedy = f"weights, {config.weight_hub.dtype_on(kind)}", "raise generator.tensor_parallel"
    device = [Item(name, weights // parallel, remedy=remedy)]
    if cache_bytes := arguments.get("kv_cache_memory_bytes"):
        remedy = "lower generator.engine_args.kv_cache_memory_bytes"
        device.append(Item("KV cache", int(cache_bytes), remedy=remedy))
    else:
        cached = 1 if "fp8" in str(arguments.get("kv_cache_dtype", "")) else itemsize
        cache = slots * (cached * sizes.cache * context + 4 * sizes.states) // parallel
        name, remedy = f"KV cache, {slots} x {context:,} tokens", SLOTS
        device.append(Item(name, cache, remedy=f"{remedy} or generator.max_context"))
    if config.trainer.lora_publish == "adapter":
        device.append(Item("adapter", sizes.adapter * itemsize))
    if vllm:
        device.append(Item("vLLM's passes and graphs", VLLM_WORK))
    else:
        at_once = row_sizes.reading_tokens(kind, sizes.parameters) // context
        prefill = context * max(1, min(slots, at_once))
        sampled = 4 * 4 * slots * sizes.vocabulary  # logits, their softmax, sorted, drawn
        device.append(Item("prefill", _forward(sizes, prefill, context, itemsize, kind)))
        device.append(Item("sampling", sampled, remedy=SLOTS))
    host = _fetched(config, published(config, sizes, gpu=gpu))
    if generator.engine == "vllm-http":  # whose servers others start
        return _need("generator", (), [], host, 1)
    if kind == "cuda" and not vllm:
        host.append(Item("the whole model while it is read", version, (LOADING,)))
    stride = parallel if ":" in generator.device else 0  # device "cuda": all share the first one
    starts = [first_gpu(generator.device) + stride * index for index in range(generator.count)]
    gpus = tuple(tuple(range(start, start + parallel)) for start in starts)
    return _need("generator", gpus if kind == "cuda" else (), device, host, generator.count)


def _fetched(config: RunConfig, version: int) -> list[Item]:
    own = config.weight_hub.plane in ("tcp", "nccl")  # of which receivers hold a version
    return [Item("a fetched version", version, LOADED)] if own else []


def _planes(config: RunConfig, version: int, gpus: Sequence[tuple[int, ...]]) -> Iterator[Need]:
    """Yield the processes that move versions to `gpus`, if such a plane is set and not `auto`."""
    plane, remedy = config.weight_hub.plane, "set weight_hub.plane = shm"
    if plane not in GPU_PLANES or not gpus:
        return
    copies = config.weight_hub.slots + 1 if plane == "cuda_ipc" else 0
    device = [Item("versions", copies * version, remedy=remedy)]
    yield _need("weight hub", (gpus[0][:1] if copies else (0,),), device, [], 1)
    if plane == "nccl":
        loaded = version if len(gpus[0]) == 1 else 0  # from there, by an engine on one GPU
        device = [Item("a version until it is loaded", loaded, remedy=remedy)]
        yield _need("weight receiver", tuple(ids[:1] for ids in gpus), device, [], len(gpus))


def _scorers(
    config: RunConfig, sizes: ModelSizes, gpu: int, host_memory: int | None
) -> Iterator[Need]:
    scorer, kind = config.scorer, kind_of(config.scorer.device, gpu=gpu > 0)
    itemsize, memory = _itemsize(config, scorer.device, gpu > 0), _memory(kind, gpu, host_memory)
    for stage in ("ref_logp", "logp"):
        count = scorer.processes(stage)
        if stage not in config.buffer.stages or not count:
            continue
        models, work = (stage == "ref_logp" and sizes.teachers) or (sizes,), 0
        for model in models:
            counts, turn = (model.parameters, itemsize, memory), config.longest_turn
            rows = row_sizes.scoring_rows(config.trainer, model.config, *counts, kind, turn)
            tokens, width = fullest(*rows, config.generator.max_context)
            logits = 4 * min(4 * tokens * model.vocabulary, int(config.trainer.logits_mib * 2**20))
            work = max(work, _forward(model, tokens, width, itemsize, kind) + logits)
        weights = [itemsize * model.parameters for model in models]
        device = [
            Item("weights", sum(weights)),
            Item("forward pass", work, remedy="lower trainer.micro_tokens"),
        ]
        reading = [Item("the whole model while it is read", max(weights), (LOADING,))]
        host = reading if kind == "cuda" else []
        if stage == "logp":
            host += _fetched(config, published(config, sizes, gpu=gpu > 0))
        gpus = ((first_gpu(scorer.device),),) * count if kind == "cuda" else ()
        yield _need(f"scorer {stage}", gpus, device, host, count)


USABLE = 0.95  # of a GPU: its allocator leaves gaps
VLLM_SHARE = 0.92  # vLLM 0.32's gpu_memory_utilization
SHARE = "gpu_memory_utilization"
MARGIN = 1.1  # more than is estimated: no estimate has been compared with a GPU yet
SLOTS_PER_CONTEXT = 4  # at most for room: answers are seldom as long as they may be
SMALLER = "trainer.lora_rank, trainer.offload or a smaller generator.max_context"


class Estimate:
    """Needs by process, their sums by GPU (`loads`) and on the host, and what does not fit.

    Each of `faults` is a sentence with the key to change; `notes` are worth knowing. `room` is how
    many full contexts vLLM's KV cache has room for; None where it need not be known.

    Raises:
        UsageError: it is not known what such a run takes.
    """

    def __init__(self, config: RunConfig, sizes: ModelSizes, machine: Machine) -> None:
        if (value := config.trainer.expert_parallel) > 1:
            raise UsageError(
                f"trainer.expert_parallel = {value}: the estimate does not know yet what it takes; "
                "estimate the run with expert_parallel = 1"
            )
        self.machine, self._generator = machine, config.generator
        self.needs = needs(config, sizes, gpu=machine.gpu, host=machine.host)
        slots, version = config.weight_hub.slots, published(config, sizes, gpu=machine.gpu > 0)
        remedy = "set weight_hub.slots = 2"
        self.arena = Item(f"arena, {slots} versions", slots * version, LOADED, remedy)
        self._by_gpu: dict[int, list[Need]] = defaultdict(list)
        for need in self.needs:
            for index in sum(need.gpus, ()):
                self._by_gpu[index].append(need)
        self.loads = {i: sum(map(self._gpu_bytes, own)) for i, own in sorted(self._by_gpu.items())}
        host_items = [item for need in self.needs for item in need.host * need.count]
        self.host = peak([self.arena, *host_items])
        self.room = self._vllm_room()
        self.faults, self.notes = [*self._faults()], list[str]()
        slots, context = config.generator.slots, config.generator.max_context
        if self.room is not None and self.room < max(1, slots / SLOTS_PER_CONTEXT):
            advice = "raise generator.tensor_parallel"
            if any(len(own) > 1 for own in self._by_gpu.values()):  # with the trainer, on its GPU
                advice = "train an adapter (trainer.lora_rank), which takes less beside it"
            (self.faults if self.room < 1 else self.notes).append(
                f"the KV cache of a generator has room for {self.room:.1f} sequences of "
                f"generator.max_context = {context} tokens, of generator.slots = {slots}"
                f"{', so vLLM would refuse to start' if self.room < 1 else ''}: lower "
                f"generator.max_context, or {advice}"
            )

    def in_short(self) -> str:
        """Return the need of each memory, the margin, and the key to change for more."""
        places = [
            *((f"GPU {index}", load, self.machine.gpu) for index, load in self.loads.items()),
            ("host", self.host, self.machine.host),
            ("/dev/shm", self.arena.bytes, self.machine.shm),
        ]
        sums = [
            f"{name} {size(needed)}"
            + (f" of {size(available)} ({1 - needed / available:.0%} left)" if available else "")
            for name, needed, available in places
        ]
        group = self.needs
        if self.loads:
            group = self._by_gpu[max(self.loads, key=self.loads.__getitem__)]
        if self.room is not None:  # vLLM takes its share whatever it needs
            sums.append(f"vLLM's KV cache has {self.room:.0f} full contexts")
            group = [need for need in group if need.name != "generator"] or group
        item = _largest([i for need in group for i in (need.device if self.loads else need.host)])
        advice = f"; for more room, {item.remedy} ({item.name}: {size(item.bytes)})"
        return ", ".join(sums) + (advice if item.remedy else "")

    def as_dict(self) -> dict[str, Any]:
        """Return values for JSON; sizes in bytes."""
        return {
            "fits": not self.faults,
            "gpu": self.machine.name,
            "gpu_bytes": self.machine.gpu,
            "gpus": {str(index): load for index, load in self.loads.items()},
            "host_bytes": self.host,
            "shm_bytes": self.arena.bytes,
            "processes": [asdict(need) for need in self.needs],
        }

    def _gpu_bytes(self, need: Need) -> int:
        """Return the bytes of each of its GPUs; vLLM takes its share whatever it needs."""
        generator, gpu = self._generator, self.machine.gpu
        if need.name == "generator" and generator.engine == "vllm" and gpu:
            return int(generator.engine_args.get(SHARE, VLLM_SHARE) * gpu)
        return peak(need.device)

    def _vllm_room(self) -> float | None:
        generator = self._generator
        need = next((need for need in self.needs if need.name == "generator" and need.gpus), None)
        fixed_cache = generator.engine_args.get("kv_cache_memory_bytes")
        if need is None or generator.engine != "vllm" or fixed_cache or not self.machine.gpu:
            return None
        weights, cache, *_ = need.device
        free = self._gpu_bytes(need) - weights.bytes - VLLM_WORK
        return max(0.0, free / (cache.bytes / generator.slots))

    def _faults(self) -> Iterator[str]:
        machine, reported = self.machine, set[str]()
        for index, load in self.loads.items():
            group = self._by_gpu[index]
            names = " and ".join(need.name for need in group)
            if not machine.gpu or load <= USABLE * machine.gpu or names in reported:
                continue
            reported.add(names)
            has = f"GPU {index} has {size(machine.gpu)} ({machine.name})"
            if len(group) > 1:
                yield (
                    f"{has}, {names} need {size(load)} together: give the generator other GPUs "
                    "(generator.device), or lower what each takes"
                )
            else:
                yield f"{has}, a {names} needs {size(load)}, most of it {_advice(group[0].device)}"
        if machine.shm is not None and self.arena.bytes > machine.shm:
            yield (
                f"/dev/shm has {size(machine.shm)}, the arena of the weights needs "
                f"{size(self.arena.bytes)}: make it larger (docker: --shm-size), or set "
                "weight_hub.slots = 2 or a smaller weight_hub.dtype"
            )
        if machine.host is not None and self.host > machine.host:
            advice = _advice([item for need in self.needs for item in need.host], " per process")
            has = f"the host has {size(machine.host)} of memory"
            yield f"{has}, the run needs {size(self.host)}, most of it {advice}"


def _advice(items: Collection[Item], unit: str = "") -> str:
    largest = _largest(items)
    return f"{largest.name} ({size(largest.bytes)}{unit}): {largest.remedy}"


def _largest(items: Collection[Item]) -> Item:
    """Return the largest item that a user can change, in the phase that needs most."""
    phase = fullest_phase(items)
    adjustable = [item for item in items if item.remedy and phase in item.during]
    return max(adjustable or items, key=lambda item: item.bytes)


def divide(config: RunConfig, set_keys: Collection[str], machine: Machine) -> tuple[RunConfig, str]:
    """Return `config` with a generator's part of the GPU, and why the run does not fit.

    That is vLLM's share of a GPU that the trainer is on too, or as many slots of the torch engine
    as fit. A run that is refused, not estimated yet, or wrong in another way is returned as it is.
    """
    try:
        sizes = read_sizes(config)
        part = _generator_part(config, Estimate(config, sizes, machine), set_keys)
        divided = msgspec.structs.replace(config, generator=part)
        faults = Estimate(divided, sizes, machine).faults
    except UsageError:
        return config, ""
    if faults:
        return config, f"{'; '.join(faults)}. A run is smaller with {SMALLER}"
    return divided, ""


def _generator_part(config: RunConfig, before: Estimate, set_keys: Collection[str]) -> Any:
    generator, gpu = config.generator, before.machine.gpu
    need = next(need for need in before.needs if need.name == "generator")
    own, rest = {*sum(need.gpus, ())}, [other for other in before.needs if other is not need]
    others = [other for other in rest if own & {*sum(other.gpus, ())}]
    room = USABLE * gpu - MARGIN * sum(peak(other.device) for other in others)
    arguments, slots = generator.engine_args, generator.slots
    if generator.engine == "vllm":
        if others and SHARE not in arguments and "kv_cache_memory_bytes" not in arguments:
            share = min(VLLM_SHARE, math.floor(100 * room / gpu) / 100)
            arguments = {**arguments, SHARE: max(share, 0.01)}
    elif "generator.slots" not in set_keys:
        grows = sum(item.bytes for item in need.device if "generator.slots" in item.remedy)
        fixed = peak(need.device) - grows
        slots = max(1, min(slots, int((room - fixed) / (grows / slots))))
    return msgspec.structs.replace(generator, slots=slots, engine_args=arguments)
