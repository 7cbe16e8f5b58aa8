"""How much of a GPU a generator takes, so that the trainer has room beside it.

Whoever starts a run asks `python -m umbra.deploy.check.share`, so that torch is loaded in a
process of its own.
"""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Collection
from typing import Any

import msgspec

from umbra.deploy.check.fit import USABLE, Machine, estimate_on
from umbra.deploy.check.items import VLLM_SHARE, Need, peak
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig

# More than is estimated: no estimate has been compared with a GPU yet.
MARGIN = 1.1
CPU_S = 180  # of processor time, torch's import included: a large model takes some 30
SHARE = "gpu_memory_utilization"
SMALLER = "trainer.lora_rank, trainer.offload or a smaller generator.max_context"


class ShareRequest(msgspec.Struct, frozen=True):
    """A run, the keys that its user has set, and bytes and name of the GPU."""

    config: RunConfig
    given: list[str]
    gpu: int
    name: str


class GpuShares(msgspec.Struct, frozen=True):
    """A generator's slots and vLLM arguments; or why the run is refused."""

    slots: int
    engine_args: dict[str, Any]
    refused: str = ""


def shares(config: RunConfig, given: Collection[str], machine: Machine) -> GpuShares:
    """vLLM's share of a GPU that the trainer is on too; as many slots of the torch engine as fit.

    Args:
        given: keys that the user has set, which stay.
        machine: whose `gpu` is the memory of the smallest GPU; host and /dev/shm are not judged.

    Raises:
        UsageError: there is no room; says what to change.
    """
    generator = config.generator
    try:
        needs = estimate_on(config, machine).needs
    except UsageError:  # not estimated yet, or refused where the run is checked
        return GpuShares(generator.slots, generator.engine_args)
    own = next(need for need in needs if need.name == "generator")
    mine = _gpus(own)
    beside = [need for need in needs if need is not own and _gpus(need) & mine]
    room = USABLE * machine.gpu - MARGIN * sum(peak(need.device) for need in beside)
    arguments, slots = generator.engine_args, generator.slots
    if generator.engine == "vllm":
        if beside and SHARE not in arguments and "kv_cache_memory_bytes" not in arguments:
            share = min(VLLM_SHARE, math.floor(100 * room / machine.gpu) / 100)
            arguments = {**arguments, SHARE: max(share, 0.01)}
    elif "generator.slots" not in given:
        grows = [item for item in own.device if "generator.slots" in item.remedy]
        each = sum(item.bytes for item in grows) / slots
        fixed = peak(own.device) - sum(item.bytes for item in grows)
        slots = max(1, min(slots, int((room - fixed) / each)))
    chosen = msgspec.structs.replace(generator, slots=slots, engine_args=arguments)
    found = estimate_on(msgspec.structs.replace(config, generator=chosen), machine)
    if found.faults:
        raise UsageError(f"{'; '.join(found.faults)}. A run is smaller with {SMALLER}")
    return GpuShares(slots, arguments)


def shares_if_any(request: ShareRequest) -> GpuShares:
    """Return `shares`, or the run's own settings where there is no room."""
    generator = request.config.generator
    try:
        return shares(request.config, request.given, Machine(request.gpu, request.name))
    except UsageError:
        return GpuShares(generator.slots, generator.engine_args)


def _gpus(need: Need) -> set[int]:
    return {index for gpus in need.gpus for index in gpus}


def _answer(request: ShareRequest) -> GpuShares:
    machine = Machine(request.gpu, request.name)
    try:
        return shares(request.config, request.given, machine)
    except UsageError as error:
        return GpuShares(0, {}, str(error))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))  # not by the clock: it may be shared
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=ShareRequest)
    sys.stdout.buffer.write(msgspec.json.encode(_answer(asked)))
