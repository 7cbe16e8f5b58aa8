"""What is known of a machine, and how its GPU is shared; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig

GIB = 1 << 30
# GiB of `torch.cuda.get_device_properties(0).total_memory`.
GPUS: dict[str, float] = {
    "a10-24": 22.0, "a100-40": 39.4, "a100-80": 79.2, "b200-180": 178.3, "h100-80": 79.1,
    "h200-141": 139.8, "l4-24": 22.0, "l40s-48": 44.4, "rtx4090-24": 23.5, "rtx5090-32": 31.3,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes of a host's memory and /dev/shm (None: unknown), and of each of its GPUs.

    `name` is that of the first GPU, `vllm` is whether vLLM is installed, `blind` why torch sees no
    GPU though there is a driver.
    """

    gpus: tuple[int, ...] = ()
    name: str = ""
    host: int | None = None
    shm: int | None = None
    vllm: bool = False
    blind: str = ""

    @property
    def gpu(self) -> int:
        """Return the memory of the smallest GPU; 0 without any."""
        return min(self.gpus, default=0)

    @classmethod
    def with_gpu(cls, kind: str) -> Machine:
        """Return a machine with GPUs of that kind, of which nothing else is known.

        Raises:
            UsageError: there is no such kind.
        """
        if kind not in GPUS:
            raise UsageError(f"--gpu {kind}: known are {', '.join(GPUS)}")
        return cls((int(GPUS[kind] * GIB),), kind, vllm=True)


def kind_of(device: str, *, gpu: bool) -> str:
    """Return "cuda" or "cpu": the meaning of a device name on a machine with or without GPUs."""
    name = device.partition(":")[0]
    return ("cuda" if gpu else "cpu") if name == "auto" else name


def first_gpu(device: str) -> int:
    number = device.partition(":")[2]
    return int(number) if number.isdigit() else 0


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
