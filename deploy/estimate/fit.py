"""Whether what a run needs is there: per GPU, host memory, shared memory; and what to change."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from umbra.deploy.estimate.items import (
    PHASES,
    VLLM_SHARE,
    VLLM_WORK,
    Facts,
    Item,
    Need,
    peak,
)
from umbra.deploy.estimate.needs import arena, needs
from umbra.services.config import RunConfig
from umbra.services.reporting.tables import size

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
        """One line for people."""
        gpus = [f"GPU {index} {size(needed)}" for index, needed in sorted(self.gpus.items())]
        return ", ".join([*gpus, f"host {size(self.host)}", f"/dev/shm {size(self.arena.bytes)}"])

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
    """What the processes of a run on one such machine need, and whether they fit."""
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


def taken(config: RunConfig, need: Need, machine: Machine) -> int:
    """Bytes of each of its GPUs; vLLM takes its share whatever it needs."""
    if need.name == "generator" and config.generator.engine == "vllm" and machine.gpu:
        return int(_vllm_share(config) * machine.gpu)
    return peak(need.device)


def _vllm_share(config: RunConfig) -> float:
    return float(config.generator.engine_args.get("gpu_memory_utilization", VLLM_SHARE))


def vllm_room(config: RunConfig, found: list[Need], machine: Machine) -> tuple[float | None, str]:
    """How many sequences of a whole context vLLM's KV cache has room for, in words too."""
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
    """The largest of those that a user can change, in the phase that needs most."""
    phase = max(PHASES, key=lambda name: sum(i.bytes for i in items if name in i.during))
    known = [item for item in items if item.remedy and phase in item.during]
    return max(known or items, key=lambda item: item.bytes)
