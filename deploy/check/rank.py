"""What a trainer rank needs: weights, gradients and moments by `trainer`'s keys, and its passes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from umbra.deploy.check.items import (
    AFTER_LOADING,
    BACKWARD,
    COLLECT,
    COMPUTE_BYTES,
    CONTEXT,
    EXPORT,
    FIRST,
    FULL,
    GPU_PROCESS,
    LOADING,
    LOGITS,
    PASSES,
    PROCESS,
    REDUCE,
    TRAINING,
    UPDATE,
    Facts,
    Item,
    ModelSizes,
    Need,
    Sized,
    first_gpu,
    kind_of,
)
from umbra.services.config import RunConfig, TrainerConfig

_SHARD = "raise trainer.ranks, or train an adapter (trainer.lora_rank)"
BLOCK = 128  # as in `services/trainer/adamw8bit.py`, which needs torch
_8BIT_COPIES = 5  # float32 ones of a tensor while AdamW8bit updates it


@dataclass(frozen=True, slots=True)
class Placed:
    """Items on the device of a rank, and in its host memory."""

    device: tuple[Item, ...]
    host: tuple[Item, ...]


def trainer_need(config: RunConfig, facts: Facts, *, gpu: bool) -> Need:
    """Return what each trainer rank needs, on a machine with or without GPUs."""
    trainer, sizes = config.trainer, facts.sizes
    ranks = trainer.ranks
    kind = kind_of(trainer.device, gpu=gpu)
    parts = [
        _states(trainer, sizes),
        _gathered(trainer, sizes, kind),
        _passes(trainer, facts, kind),
    ]
    if trainer.pieces.advantage == "gae" and config.critic.kind == "model":
        # The critic's passes and the policy's may be under way at the same time.
        own = _critic(trainer)
        more = (_states(own, sizes), _gathered(own, sizes, kind), _passes(own, facts, kind))
        parts += [Placed(_named(part.device), _named(part.host)) for part in more]
    device = [item for part in parts for item in part.device]
    host = [Item("process", GPU_PROCESS if kind == "cuda" else PROCESS)]
    host += [item for part in parts for item in part.host]
    trained = sizes.share(ranks, trained=True)
    largest = max(tensor.share(ranks) for tensor in sizes.tensors)
    # A rank reads its rows of one tensor at a time.
    host.append(Item("rows of a tensor while it is read", 4 * largest, (LOADING,)))
    if config.checkpoint.every:
        state = 4 * trained + moments(trainer, sizes)
        host.append(Item("copy for checkpoints", state, AFTER_LOADING, "set checkpoint.every = 0"))
    if trainer.mismatch_every and config.buffer.run_ahead:
        aside = _weight_bytes(trainer) * trained
        host.append(Item("weights kept aside", aside, TRAINING, "set trainer.mismatch_every = 0"))
    if kind == "cuda" or ranks > 1 or trainer.lora_rank:
        whole = 4 * sizes.parameters // ranks  # which rank 0 has for all of them
        host.append(Item("the whole model for the export, per rank", whole, (EXPORT,)))
    if kind == "cuda":
        first = first_gpu(trainer.device)
        device.append(Item("CUDA and NCCL", CONTEXT))
        gpus = tuple((first + rank,) for rank in range(ranks))
        return Need("trainer rank", gpus, tuple(device), tuple(host), ranks)
    return Need("trainer rank", (), (), (*host, *device), ranks)


def moments(trainer: TrainerConfig, sizes: ModelSizes) -> int:
    """Return the bytes of a rank's optimizer states."""
    trained = sizes.share(trainer.ranks, trained=True)
    if trainer.optimizer == "sgd":
        return 4 * trained if trainer.betas[0] else 0
    if trainer.optimizer == "adamw8bit":
        return sum(_in_8_bits(tensor, trainer.ranks) for tensor in sizes.tensors if tensor.trained)
    return 8 * trained


def _in_8_bits(tensor: Sized, ranks: int) -> int:
    """Bytes of two moments, each a code for a number and a scale for a block of a row."""
    share, width = tensor.share(ranks), tensor.width
    if width < BLOCK or width % BLOCK:
        return 8 * share
    return 2 * (share + 4 * share // BLOCK)


def _weight_bytes(trainer: TrainerConfig) -> int:
    return 2 if trainer.weights == "bf16" else 4


def _states(trainer: TrainerConfig, sizes: ModelSizes) -> Placed:
    """Weights, gradients, master weights and the optimizer's moments; see `Learner`."""
    ranks, each = trainer.ranks, _weight_bytes(trainer)
    share, trained = sizes.share(ranks), sizes.share(ranks, trained=True)
    rows_on_host = trainer.offload == "all" and ranks > 1
    step_on_host = trainer.offload in ("optimizer", "all")
    copies = each == 2 or (step_on_host and not rows_on_host)
    rows: list[Item] = [Item(f"weights, {_name(each)}", each * share, remedy=_SHARD)]
    step: list[Item] = []
    if copies:
        step.append(Item("float32 copies", 4 * trained, remedy=_SHARD))
        # Each micro-batch has gradients of its own, which are added to those of the copies.
        rows.append(Item("gradients of a micro-batch", each * trained, (FIRST, COLLECT), _SHARD))
        head = each * sizes.root_share(ranks)
        rows.append(Item("of these, outside of layers", head, FULL, _SHARD))
    step.append(Item("gradients, float32", 4 * trained, AFTER_LOADING, _SHARD))
    name = f"moments, {trainer.optimizer}"
    step.append(Item(name, moments(trainer, sizes), AFTER_LOADING, _SHARD))
    if trainer.optimizer == "adamw8bit":
        largest = max(tensor.share(ranks) for tensor in sizes.tensors if tensor.trained)
        step.append(Item("an update's scratch", _8BIT_COPIES * 4 * largest, (UPDATE,)))
    device = [*(() if rows_on_host else rows), *(() if step_on_host else step)]
    host = [*(rows if rows_on_host else ()), *(step if step_on_host else ())]
    return Placed(tuple(device), tuple(host))


def _name(each: int) -> str:
    return "bfloat16" if each == 2 else "float32"


def _critic(trainer: TrainerConfig) -> TrainerConfig:
    """Return the settings of a critic's own model: float32, on the host only where FSDP puts it."""
    offload = trainer.offload
    if offload == "optimizer":
        offload = "none"
    elif offload == "all" and trainer.ranks == 1:
        offload = "activations"
    return msgspec.structs.replace(
        trainer,
        weights="float32",
        optimizer="adamw",
        offload=offload,
    )


def _named(items: tuple[Item, ...]) -> tuple[Item, ...]:
    return tuple(replace(item, name=f"critic: {item.name}") for item in items if item.bytes)


def _gathered(trainer: TrainerConfig, sizes: ModelSizes, kind: str) -> Placed:
    """What FSDP2 has of parameters and gradients that are not shards.

    What is outside of the layers stays gathered for a pass. Of the layers there is the one at work,
    and on GPUs the next one and the buffer that it is gathered into; or all of them, where they
    stay for the backward pass. Gradients are summed in float32, from a buffer that lives until
    those of the next layer are summed, to a rank's share of them.
    """
    ranks = trainer.ranks
    if ranks == 1:
        return Placed((), ())
    each = COMPUTE_BYTES[trainer.precision_on(kind)]
    root, root_trained = sizes.root
    layer, trained = sizes.largest_layer
    none = "there is no key for it; a GPU with more memory"
    buffered = 2 * each * layer if kind == "cuda" else 0
    items = [Item("gathered parameters", each * root, PASSES, none)]
    items.append(Item("a layer, gathered", each * layer, (BACKWARD, FIRST), none))
    items.append(Item("the next one and its buffer", buffered, (*FULL, FIRST), none))
    shared = 4 + 4 // ranks  # a buffer in float32, and what comes of it
    items += [
        Item("gathered gradients", each * root_trained, (BACKWARD, REDUCE, FIRST, COLLECT), none),
        Item("a layer's gradients, and a buffer", trained * (each + 4), (BACKWARD, FIRST), none),
        Item("a layer's gradients, summed", trained * (each + 4 + shared), (REDUCE,), none),
        Item("gradients outside of layers, summed", root_trained * shared, (COLLECT,), none),
    ]
    return Placed(tuple(items), ())


def _passes(trainer: TrainerConfig, facts: Facts, kind: str) -> Placed:
    """Return what forward and backward passes take beyond parameters and gradients."""
    training, rows = facts.training, facts.rows
    less = "lower trainer.micro_tokens"
    if not trainer.recomputes_on(kind):
        less = "set trainer.activation_checkpointing = true"
    elif rows.count == 1:
        less = "lower generator.max_context or trainer.pack_tokens"
    shared = trainer.sequence_parallel
    what = f"{rows.count} x {rows.width:,} tokens{f' over {shared} ranks' if shared > 1 else ''}"
    kept = training.kept - training.attention
    return Placed(
        (
            Item(f"activations, {what}", kept, FULL, less),
            Item("masks and scores", training.attention, FULL, "lower trainer.pack_tokens"),
            Item("logits", training.logits, (LOGITS,), "lower trainer.logits_mib"),
            Item("a layer's forward and backward pass", training.working, (BACKWARD, FIRST), less),
        ),
        (Item(f"activations, {what}", training.offloaded, FULL, less),)
        if training.offloaded
        else (),
    )
