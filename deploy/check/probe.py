"""Prints the GPUs that torch sees, as JSON: `python -m umbra.deploy.check.probe`.

A process of its own, because a driver that is out of order may hang or end whoever asks it.
"""

from __future__ import annotations

import sys

import msgspec
import torch

from umbra.deploy.check.machine import Gpu, GpusSeen


def look() -> GpusSeen:
    if not torch.cuda.is_available():
        why_not = "there is none" if torch.version.cuda else "this torch is built without CUDA"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            why_not = str(error).partition("\n")[0]
        return GpusSeen([], why_not)
    found: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return GpusSeen(found)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(look()))
