"""GPUs by name, and the memory that CUDA tells of each (a little less than is printed on it)."""

from __future__ import annotations

from umbra.proto.errors import UsageError

GIB = 1 << 30

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


def gpu_bytes(name: str) -> int:
    """The memory of a GPU of that kind.

    Raises:
        UsageError: there is no such kind.
    """
    if name not in GPUS:
        raise UsageError(f"--gpu {name}: known are {', '.join(GPUS)}")
    return int(GPUS[name] * GIB)
