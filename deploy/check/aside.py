"""Checks that need torch, in their own process: `python -m umbra.deploy.check.aside`.

A driver that is out of order may hang or end whoever asks it, and torch takes half a GiB. Prints as
JSON the GPUs that torch sees; of a request on standard input the choice, or a model's counts.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import msgspec
import torch

from umbra.deploy.check.built import count
from umbra.deploy.check.choose import ChoiceRequest, for_hardware
from umbra.deploy.check.counts import Build
from umbra.deploy.check.hardware import Gpu, GpusSeen
from umbra.proto.errors import UmbraError

CPU_S = 180  # of processor time, torch's import included: a large model takes some 30


def look() -> GpusSeen:
    if not torch.cuda.is_available():
        why_not = "there is none" if torch.version.cuda else "this torch is built without CUDA"
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            why_not = str(error).partition("\n")[0]
        node = any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg"))  # dxg: of WSL
        version, visible = str(torch.__version__), os.environ.get("CUDA_VISIBLE_DEVICES")
        return GpusSeen([], why_not, version, torch.version.cuda or "", node, visible)
    found: list[Gpu] = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return GpusSeen(found)


if __name__ == "__main__":
    if data := sys.stdin.buffer.read():
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))  # the clock counts others' work too
        asked = msgspec.json.decode(data, type=ChoiceRequest | Build)
        try:
            if isinstance(asked, Build):
                answer = count(asked)
            else:
                answer = for_hardware(asked.config, asked.given, asked.machine)
        except UmbraError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
    else:
        answer = look()
    sys.stdout.buffer.write(msgspec.json.encode(answer))
