"""Whether what a run needs is there: per GPU, host memory, shared memory; and what to change."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from umbra.deploy.check.items import (
    GIB,
    PHASES,
    VLLM_SHARE,
    VLLM_WORK,
    Facts,
    Item,
    Need,
    peak,
)
from umbra.deploy.check.needs import arena, needs
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.process.host_memory import host_bytes
from umbra.services.reporting.tables import size
from umbra.services.weights.arena import SHM

# GiB of `torch.cuda.get_device_properties(0).total_memory`.
GPUS: dict[str, float] = {
    "a10-24": 22.0,
    "a100-40": 39.4,
    "a100-80": 79.2,
    "b200-180": 178.3,
    "h100-80": 79.1,
    "h200-141": 139.8,
    "l4-24": 22.0,
    "l40s-48": 44.4,
    "rtx4090-24": 23.5,
    "rtx5090-32": 31.3,
}
USABLE = 0.95  # of a GPU: its allocator leaves gaps


@dataclass(frozen=True, slots=True)
class Machine:
    """What a host has, in bytes; None where it is not known.

    Attributes:
        gpu: memory of each of its GPUs; 0: it has none.
    """

    gpu: int
    gpu_name: str = ""
    host: int | None = None
    shm: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run needs, and where it does not fit.

    Attributes:
        faults: what does not fit, each a sentence that names the key to change.
        notes: what else is worth knowing.
    """

    machine: Machine
    needs: tuple[Need, ...]
    arena: Item
    gpus: dict[int, int]
    host: int
    faults: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.faults

    def in_short(self) -> str:
        """Return one line with the margin of each kind of memory."""
        machine = self.machine
        parts = [
            _with_margin(f"GPU {index}", needed, machine.gpu)
            for index, needed in sorted(self.gpus.items())
        ]
        parts.append(_with_margin("host", self.host, machine.host))
        return ", ".join([*parts, _with_margin("/dev/shm", self.arena.bytes, machine.shm)])

    def as_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        return {
            "fits": self.fits,
            "faults": list(self.faults),
            "notes": list(self.notes),
            "gpu": self.machine.gpu_name,
            "gpu_bytes": self.machine.gpu,
            "gpus": {str(index): needed for index, needed in sorted(self.gpus.items())},
            "host_bytes": self.host,
            "shm_bytes": self.arena.bytes,
            "processes": [
                {
                    "name": need.name,
                    "count": need.count,
                    "gpus": [list(gpus) for gpus in need.gpus],
                    "device_bytes": peak(need.device) if need.device else 0,
                    "host_bytes": peak(need.host),
                    "device": {item.name: item.bytes for item in need.device},
                    "host": {item.name: item.bytes for item in need.host},
                }
                for need in self.needs
            ],
        }


def estimate(config: RunConfig, facts: Facts, machine: Machine) -> Estimate:
    """Return what the processes of a run on one such machine need, and whether they fit."""
    found = needs(config, facts, gpu=machine.gpu > 0)
    slots = arena(config, facts.sizes, gpu=machine.gpu > 0)
    by_gpu: dict[int, list[Need]] = defaultdict(list)
    for need in found:
        for gpus in need.gpus:
            for index in gpus:
                by_gpu[index].append(need)
    loads = {
        index: sum(taken(config, need, machine) for need in there)
        for index, there in by_gpu.items()
    }
    every = [item for need in found for item in need.host for _ in range(need.count)]
    host = peak([*every, slots])
    faults = [
        *(_gpu_faults(by_gpu, loads, machine) if machine.gpu else ()),
        *_host_faults(found, slots, host, machine),
    ]
    room, note = vllm_room(config, found, machine)
    if room is not None and room < 1:
        faults.append(
            f"{note}, so vLLM would refuse to start: lower generator.max_context, or raise "
            "generator.tensor_parallel"
        )
        note = ""
    return Estimate(
        machine, tuple(found), slots, loads, host, tuple(faults), (note,) if note else ()
    )


def _with_margin(name: str, needed: int, there: int | None) -> str:
    if not there:
        return f"{name} {size(needed)}"
    return f"{name} {size(needed)} of {size(there)} ({1 - needed / there:.0%} left)"


def taken(config: RunConfig, need: Need, machine: Machine) -> int:
    """Return the bytes of each of its GPUs; vLLM takes its share whatever it needs."""
    if need.name == "generator" and config.generator.engine == "vllm" and machine.gpu:
        return int(_vllm_share(config) * machine.gpu)
    return peak(need.device)


def _vllm_share(config: RunConfig) -> float:
    return float(config.generator.engine_args.get("gpu_memory_utilization", VLLM_SHARE))


def vllm_room(config: RunConfig, found: list[Need], machine: Machine) -> tuple[float | None, str]:
    """Return how many full contexts vLLM's KV cache has room for, and a sentence if too few."""
    generator = config.generator
    need = next((need for need in found if need.name == "generator" and need.gpus), None)
    given = generator.engine_args.get("kv_cache_memory_bytes")
    if need is None or generator.engine != "vllm" or given or not machine.gpu:
        return None, ""
    weights, cache = need.device[0].bytes, need.device[1].bytes
    left = _vllm_share(config) * machine.gpu - weights - VLLM_WORK
    room = max(0.0, left / (cache / generator.slots))
    if room >= generator.slots:
        return room, ""
    return room, (
        f"the KV cache of a generator has room for {room:.1f} sequences of generator.max_context = "
        f"{generator.max_context} tokens, of generator.slots = {generator.slots}"
    )


def _gpu_faults(
    by_gpu: dict[int, list[Need]], loads: dict[int, int], machine: Machine
) -> Iterator[str]:
    told: set[str] = set()
    for index, there in sorted(by_gpu.items()):
        names = " and ".join(need.name for need in there)
        if loads[index] <= USABLE * machine.gpu or names in told:
            continue
        told.add(names)
        what = f"GPU {index} has {size(machine.gpu)} ({machine.gpu_name}), of which "
        if len(there) > 1:
            yield (
                f"{what}{names} need {size(loads[index])} together: give the "
                "generator other GPUs (generator.device), or lower what each takes"
            )
            continue
        largest = _largest(there[0].device)
        yield (
            f"{what}a {names} needs {size(loads[index])}, most of it {largest.name} "
            f"({size(largest.bytes)}): {largest.remedy}"
        )


def _host_faults(found: list[Need], slots: Item, host: int, machine: Machine) -> Iterator[str]:
    if machine.shm is not None and slots.bytes > machine.shm:
        yield (
            f"/dev/shm has {size(machine.shm)}, the arena of the weights needs "
            f"{size(slots.bytes)}: make it larger (docker: --shm-size), or set weight_hub.slots = "
            "2 or a smaller weight_hub.dtype"
        )
    if machine.host is not None and host > machine.host:
        largest = _largest([item for need in found for item in need.host])
        yield (
            f"the host has {size(machine.host)} of memory, the run needs {size(host)}, most of it "
            f"{largest.name} ({size(largest.bytes)} per process): {largest.remedy}"
        )


def _largest(items: tuple[Item, ...] | list[Item]) -> Item:
    """Return the largest item that a user can change, in the phase that needs most."""
    phase = max(PHASES, key=lambda name: sum(i.bytes for i in items if name in i.during))
    known = [item for item in items if item.remedy and phase in item.during]
    return max(known or items, key=lambda item: item.bytes)


def gpu_bytes(name: str) -> int:
    """The memory of a GPU of that kind.

    Raises:
        UsageError: there is no such kind.
    """
    if name not in GPUS:
        raise UsageError(f"--gpu {name}: known are {', '.join(GPUS)}")
    return int(GPUS[name] * GIB)


def estimate_on(config: RunConfig, machine: Machine) -> Estimate:
    """Return the estimate of a run with the model that it names.

    Raises:
        UsageError: there is no such model, or it is refused.
    """
    from umbra.deploy.check.facts import gather_facts  # brings torch

    return estimate(config, gather_facts(config, gpu=machine.gpu, host=machine.host), machine)


def this_machine() -> Machine:
    """Return the first GPU, the host's memory (or what a container may take) and /dev/shm."""
    import torch

    gpu, name = 0, ""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        gpu, name = found.total_memory, found.name
    stats = os.statvfs(SHM)
    return Machine(gpu, name, host_bytes(), stats.f_blocks * stats.f_frsize)
