"""The estimate of a run on a machine: this one, unless another is described."""

from __future__ import annotations

import os

from umbra.deploy.estimate.fit import Estimate, Machine, estimate
from umbra.services.config import RunConfig
from umbra.services.process.host_memory import host_bytes
from umbra.services.weights.arena import SHM


def estimate_on(config: RunConfig, machine: Machine) -> Estimate:
    """The estimate of a run with the model that it names.

    Raises:
        UsageError: there is no such model, or it is refused.
    """
    from umbra.deploy.estimate.facts import gather_facts  # brings torch

    return estimate(config, gather_facts(config, gpu=machine.gpu, host=machine.host), machine)


def this_machine() -> Machine:
    """What is here: the first GPU, the host's memory (or what a container may take), /dev/shm."""
    import torch

    gpu, name = 0, ""
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        gpu, name = found.total_memory, found.name
    stats = os.statvfs(SHM)
    return Machine(gpu, name, host_bytes(), stats.f_blocks * stats.f_frsize)
