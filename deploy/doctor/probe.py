"""Prints what torch and CuPy see of the GPUs, as JSON: `python -m umbra.deploy.doctor.probe`.

A process of its own, because a driver that is out of order may hang or end whoever asks it.
"""

from __future__ import annotations

import sys
from itertools import permutations

import msgspec
import torch

from umbra.deploy.doctor.judge import Gpu, GpusSeen
from umbra.services.weights.gpu.cuda import nccl_unavailable


def look() -> GpusSeen:
    """What there is."""
    why_not = ""
    if not torch.cuda.is_available():
        why_not = "there is none" if torch.version.cuda else "this torch is built without CUDA"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            why_not = str(error).partition("\n")[0]
    count = 0 if why_not else torch.cuda.device_count()
    gpus: list[Gpu] = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total, free))
    apart = [
        (a, b)
        for a, b in permutations(range(count), 2)
        if a < b and not torch.cuda.can_device_access_peer(a, b)
    ]
    distributed = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return GpusSeen(
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        why_not=why_not,
        gpus=gpus,
        apart=apart,
        torch_nccl="" if distributed else "built without NCCL",
        hub_nccl=nccl_unavailable() or "" if count else "",
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(look()))
