"""How much of a GPU a generator takes, so that the trainer has room beside it.

Whoever starts a run asks `python -m umbra.deploy.check.share`, so that torch is loaded in a
process of its own.
"""

from __future__ import annotations

import math
import resource
import sys
from typing import Any

import msgspec

from umbra.deploy.check.estimate import USABLE, VLLM_SHARE, Estimate, estimate
from umbra.deploy.check.hardware import GpuShares, Machine, ShareRequest
from umbra.deploy.check.needs import peak
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig

MARGIN = 1.1  # more than is estimated: no estimate has been compared with a GPU yet
CPU_S = 180  # of processor time, torch's import included: a large model takes some 30
SHARE = "gpu_memory_utilization"
SMALLER = "trainer.lora_rank, trainer.offload or a smaller generator.max_context"


def shares(request: ShareRequest) -> GpuShares:
    """vLLM's share of a GPU that the trainer is on too; as many slots of the torch engine as fit.

    What is not estimated yet, or refused where the run is checked, is left as it is.
    """
    config, machine = request.config, Machine((request.gpu,), request.name)
    generator = config.generator
    try:
        found = estimate(config, machine)
        chosen = _divided(config, found, request.given)
        faults = estimate(msgspec.structs.replace(config, generator=chosen), machine).faults
    except UsageError:
        return GpuShares(generator.slots, generator.engine_args)
    refused = f"{'; '.join(faults)}. A run is smaller with {SMALLER}" if faults else ""
    return GpuShares(chosen.slots, chosen.engine_args, refused)


def _divided(config: RunConfig, found: Estimate, given: list[str]) -> Any:
    """Return the generator's section with its part of the GPU."""
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
    return msgspec.structs.replace(generator, slots=slots, engine_args=arguments)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))  # not by the clock: it may be shared
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=ShareRequest)
    sys.stdout.buffer.write(msgspec.json.encode(shares(asked)))
