"""Estimate of a run's memory: the margin, and the key to lower if it does not fit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from msgspec.structs import replace

from umbra.deploy.check.hardware import Machine
from umbra.deploy.check.model_sizes import ModelSizes, read_sizes
from umbra.deploy.check.needs import (
    LOADED,
    PHASES,
    VLLM_WORK,
    Item,
    Need,
    needs,
    peak,
    published,
)
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.reporting.tables import size

USABLE = 0.95  # of a GPU: its allocator leaves gaps
VLLM_SHARE = 0.92  # vLLM 0.32's gpu_memory_utilization
SHARE = "gpu_memory_utilization"
MARGIN = 1.1  # more than is estimated: no estimate has been compared with a GPU yet
ENOUGH = 4  # times fewer full contexts than slots: answers are seldom as long as they may be
SMALLER = "trainer.lora_rank, trainer.offload or a smaller generator.max_context"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Needs by process, their sums by GPU (`loads`) and on the host, and what does not fit.

    Each of `faults` is a sentence with the key to change; `notes` are worth knowing.
    """

    machine: Machine
    needs: tuple[Need, ...]
    arena: Item
    loads: dict[int, int]
    host: int
    faults: tuple[str, ...]
    notes: tuple[str, ...]
    room: float | None  # in vLLM's KV cache, as `vllm_room`
    largest: Item  # that a user can change, on the fullest GPU or the host

    def places(self) -> list[tuple[str, int, int | None, str]]:
        """Return name, bytes needed, bytes there (if known) and kind of each memory."""
        gpu, kind = self.machine.gpu or None, self.machine.name
        return [
            *((f"GPU {index}", load, gpu, kind) for index, load in sorted(self.loads.items())),
            ("host", self.host, self.machine.host, ""),
            ("/dev/shm", self.arena.bytes, self.machine.shm, ""),
        ]

    def in_short(self) -> str:
        """Return the need of each memory, the margin, and the key to change for more."""
        sums = [
            f"{name} {size(needed)}"
            + (f" of {size(there)} ({1 - needed / there:.0%} left)" if there else "")
            for name, needed, there, _ in self.places()
        ]
        if self.room is not None:
            sums.append(f"vLLM's KV cache has {self.room:.0f} full contexts")
        item = self.largest
        more = f"; for more, {item.remedy} ({item.name}: {size(item.bytes)})" if item.remedy else ""
        return ", ".join(sums) + more

    def as_dict(self) -> dict[str, Any]:
        """Return values for JSON; sizes in bytes."""
        return {
            "fits": not self.faults,
            "gpu": self.machine.name,
            "gpu_bytes": self.machine.gpu,
            "gpus": {str(index): load for index, load in sorted(self.loads.items())},
            "host_bytes": self.host,
            "shm_bytes": self.arena.bytes,
            "processes": [asdict(need) for need in self.needs],
        }


def estimate(config: RunConfig, machine: Machine) -> Estimate:
    """Return what the run needs by its model's config.json; UsageError if that cannot be told."""
    return judge(config, read_sizes(config), machine)


def judge(config: RunConfig, sizes: ModelSizes, machine: Machine) -> Estimate:
    """Return `estimate` for a model of these sizes."""
    if (value := config.trainer.expert_parallel) > 1:
        raise UsageError(
            f"trainer.expert_parallel = {value}: the estimate does not know yet what it takes; "
            "estimate the run with expert_parallel = 1"
        )
    found = needs(config, sizes, gpu=machine.gpu, host=machine.host)
    copies = config.weight_hub.slots
    version = published(config, sizes, gpu=machine.gpu > 0)
    arena = Item(f"arena, {copies} versions", copies * version, LOADED, "set weight_hub.slots = 2")
    by_gpu: dict[int, list[Need]] = defaultdict(list)
    for need in found:
        for index in (index for gpus in need.gpus for index in gpus):
            by_gpu[index].append(need)
    loads = {i: sum(taken(config, one, machine) for one in own) for i, own in by_gpu.items()}
    host = peak([arena, *(item for need in found for item in need.host * need.count)])
    faults = [*_gpu_faults(by_gpu, loads, machine), *_host_faults(found, arena, host, machine)]
    slots, room = config.generator.slots, vllm_room(config, found, machine)
    notes: list[str] = []
    if room is not None and room < max(1, slots / ENOUGH):
        has = (
            f"the KV cache of a generator has room for {room:.1f} sequences of "
            f"generator.max_context = {config.generator.max_context} tokens, of generator.slots = "
            f"{slots}{', so vLLM would refuse to start' if room < 1 else ''}"
        )
        beside = any(len(own) > 1 for own in by_gpu.values())  # the trainer, on the same GPU
        adapter = "train an adapter (trainer.lora_rank), which takes less beside it"
        more = adapter if beside else "raise generator.tensor_parallel"
        (faults if room < 1 else notes).append(f"{has}: lower generator.max_context, or {more}")
    # vLLM takes its share whatever it needs.
    own = by_gpu[max(loads, key=loads.__getitem__)] if loads else found
    choosable = [one for one in own if room is None or one.name != "generator"] or own
    most = _largest(tuple(i for one in choosable for i in (one.device if loads else one.host)))
    told = tuple(faults), tuple(notes)
    return Estimate(machine, tuple(found), arena, loads, host, *told, room, most)


def taken(config: RunConfig, need: Need, machine: Machine) -> int:
    """Return the bytes of each of its GPUs; vLLM takes its share whatever it needs."""
    if need.name == "generator" and config.generator.engine == "vllm" and machine.gpu:
        share = config.generator.engine_args.get(SHARE, VLLM_SHARE)
        return int(share * machine.gpu)
    return peak(need.device)


def vllm_room(config: RunConfig, found: list[Need], machine: Machine) -> float | None:
    """Return how many full contexts vLLM's KV cache has room for; None where it need not be."""
    generator = config.generator
    need = next((need for need in found if need.name == "generator" and need.gpus), None)
    given = generator.engine_args.get("kv_cache_memory_bytes")
    if need is None or generator.engine != "vllm" or given or not machine.gpu:
        return None
    weights, cache = need.device[0].bytes, need.device[1].bytes
    left = taken(config, need, machine) - weights - VLLM_WORK
    return max(0.0, left / (cache / generator.slots))


def _gpu_faults(
    by_gpu: dict[int, list[Need]], loads: dict[int, int], machine: Machine
) -> Iterator[str]:
    told: set[str] = set()
    for index, own in sorted(by_gpu.items()):
        names = " and ".join(need.name for need in own)
        if not machine.gpu or loads[index] <= USABLE * machine.gpu or names in told:
            continue
        told.add(names)
        what = f"GPU {index} has {size(machine.gpu)} ({machine.name}), of which "
        if len(own) > 1:
            yield (
                f"{what}{names} need {size(loads[index])} together: give the "
                "generator other GPUs (generator.device), or lower what each takes"
            )
            continue
        largest = _largest(own[0].device)
        yield (
            f"{what}a {names} needs {size(loads[index])}, most of it {largest.name} "
            f"({size(largest.bytes)}): {largest.remedy}"
        )


def _host_faults(found: list[Need], arena: Item, host: int, machine: Machine) -> Iterator[str]:
    if machine.shm is not None and arena.bytes > machine.shm:
        yield (
            f"/dev/shm has {size(machine.shm)}, the arena of the weights needs "
            f"{size(arena.bytes)}: make it larger (docker: --shm-size), or set weight_hub.slots = "
            "2 or a smaller weight_hub.dtype"
        )
    if machine.host is not None and host > machine.host:
        largest = _largest(tuple(item for need in found for item in need.host))
        yield (
            f"the host has {size(machine.host)} of memory, the run needs {size(host)}, most of it "
            f"{largest.name} ({size(largest.bytes)} per process): {largest.remedy}"
        )


def _largest(items: tuple[Item, ...]) -> Item:
    """Return the largest item that a user can change, in the phase that needs most."""
    phase = max(PHASES, key=lambda name: sum(i.bytes for i in items if name in i.during))
    known = [item for item in items if item.remedy and phase in item.during]
    return max(known or items, key=lambda item: item.bytes)


def divide(config: RunConfig, given: Collection[str], machine: Machine) -> tuple[RunConfig, str]:
    """Return `config` with a generator's part of the GPU, and why the run does not fit.

    That is vLLM's share of a GPU that the trainer is on too, or as many slots of the torch engine
    as fit. A run that is refused, not estimated yet, or wrong in another way is returned as it is.
    """
    try:
        found = estimate(config, machine)
        divided = replace(config, generator=_generator_part(config, found, given))
        faults = estimate(divided, machine).faults
    except UsageError:
        return config, ""
    if faults:
        return config, f"{'; '.join(faults)}. A run is smaller with {SMALLER}"
    return divided, ""


def _generator_part(config: RunConfig, found: Estimate, given: Collection[str]) -> Any:
    generator, gpu = config.generator, found.machine.gpu
    own = next(need for need in found.needs if need.name == "generator")
    mine = {index for gpus in own.gpus for index in gpus}
    beside = [
        need for need in found.needs if need is not own and any(mine & {*g} for g in need.gpus)
    ]
    room = USABLE * gpu - MARGIN * sum(peak(need.device) for need in beside)
    arguments, slots = generator.engine_args, generator.slots
    if generator.engine == "vllm":
        if beside and SHARE not in arguments and "kv_cache_memory_bytes" not in arguments:
            share = min(VLLM_SHARE, math.floor(100 * room / gpu) / 100)
            arguments = {**arguments, SHARE: max(share, 0.01)}
    elif "generator.slots" not in given:
        grows = sum(item.bytes for item in own.device if "generator.slots" in item.remedy)
        fixed = peak(own.device) - grows
        slots = max(1, min(slots, int((room - fixed) / (grows / slots))))
    return replace(generator, slots=slots, engine_args=arguments)
