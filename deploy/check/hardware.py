"""Facts of a machine; nothing here needs torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from functools import cache
from typing import TypeVar

import msgspec

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.process.child import child_error, describe_exit, own_exit_code, python_argv
from umbra.services.process.host_memory import host_bytes
from umbra.services.process.versions import driver_version
from umbra.services.weights.arena import SHM

GIB = 1 << 30
# GiB of `torch.cuda.get_device_properties(0).total_memory`.
GPUS: dict[str, float] = {
    "a10-24": 22.0, "a100-40": 39.4, "a100-80": 79.2, "b200-180": 178.3, "h100-80": 79.1,
    "h200-141": 139.8, "l4-24": 22.0, "l40s-48": 44.4, "rtx4090-24": 23.5, "rtx5090-32": 31.3,
}  # fmt: skip
PROGRAM_S = 180.0  # for a process that loads torch, on a slow disk
LEAST_DRIVER = {12: 525, 13: 580}  # by CUDA major (NVIDIA, "CUDA minor version compatibility")

T = TypeVar("T")


class Machine(msgspec.Struct, frozen=True):
    """Bytes of a host's memory and /dev/shm (None: unknown), and of each of its GPUs.

    `name` is that of the first GPU, `vllm` is whether vLLM is installed, `blind` why torch sees no
    GPU though there is a driver, and the remedy (see `why_blind`), `cores` how many CPUs this
    process may use (0: unknown).
    """

    gpus: tuple[int, ...] = ()
    name: str = ""
    host: int | None = None
    shm: int | None = None
    vllm: bool = False
    blind: str = ""
    cores: int = 0

    @property
    def gpu(self) -> int:
        """Return the memory of the smallest GPU; 0 without any."""
        return min(self.gpus, default=0)

    @classmethod
    def with_gpu(cls, kind: str) -> Machine:
        """Return a machine known by its GPUs alone; UsageError if there is no such kind."""
        if kind not in GPUS:
            raise UsageError(f"--gpu {kind}: known are {', '.join(GPUS)}")
        return cls((int(GPUS[kind] * GIB),), kind, vllm=True)


class Gpu(msgspec.Struct, frozen=True):
    name: str
    total: int
    free: int


class GpusSeen(msgspec.Struct, frozen=True):
    """The GPUs that torch sees, and what says `why_not` if it sees none.

    `torch` is its version, `cuda` of the CUDA it is built for (empty: for CPUs), `node` whether
    the process is given a device of the driver, `visible` its CUDA_VISIBLE_DEVICES.
    """

    gpus: list[Gpu]
    why_not: str = ""
    torch: str = ""
    cuda: str = ""
    node: bool = True
    visible: str | None = None


def ask_aside(kind: type[T], request: object = None, *, timeout_s: float = PROGRAM_S) -> T:
    """Return the answer of `aside` to a request; UmbraError with the reason if there is none."""
    command = python_argv("umbra.deploy.check.aside")
    data = b"" if request is None else msgspec.json.encode(request)
    try:
        done = subprocess.run(
            command, input=data, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise UmbraError(f"it took longer than {timeout_s:g} s") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise child_error(last or describe_exit(done.returncode), own_exit_code(done.returncode))
    return msgspec.json.decode(done.stdout, type=kind)


@cache
def gpus_seen() -> GpusSeen:
    """Return the GPUs that torch sees; UmbraError with the reason if it does not answer."""
    return ask_aside(GpusSeen)


def why_blind(seen: GpusSeen, driver: str) -> str:
    """Return why torch sees no GPU of this driver, and after the last semicolon the remedy."""
    least = LEAST_DRIVER.get(int(seen.cuda.partition(".")[0] or 0), 0)
    major = driver.partition(".")[0]
    if not seen.cuda:
        return (
            f"torch {seen.torch} is built for CPUs; install one from PyPI (CUDA 13, driver 580 or "
            "newer) or from PyTorch's cu12 index (driver 525)"
        )
    if not seen.node:
        return (
            "this process has no /dev/nvidiactl, as in a container without GPUs; give it GPUs "
            "(docker: --gpus all, SLURM: --gres=gpu:1, Kubernetes: nvidia.com/gpu)"
        )
    variable = f'CUDA_VISIBLE_DEVICES = "{seen.visible}"'
    if seen.visible is not None and seen.visible.strip() in ("", "-1", "NoDevFiles"):
        return f"{variable} hides all GPUs; unset it, or name some that nvidia-smi lists"
    if major.isdigit() and int(major) < least:
        return (
            f"driver {driver} is too old for torch {seen.torch}, which is built for CUDA "
            f"{seen.cuda} and needs {least} or newer ({seen.why_not}); update the driver, or "
            "install a torch from PyTorch's index for a CUDA that this driver has"
        )
    hidden = f" with {variable}" if seen.visible else ""
    return f"{seen.why_not}{hidden}; see whether nvidia-smi lists the GPUs, and which"


def silent(error: UmbraError) -> str:
    """Return why torch names no GPU if it did not answer, and after the semicolon the remedy."""
    return f"torch was asked for them, and {error}; see whether nvidia-smi answers, and torch loads"


def this_machine() -> Machine:
    """Return this machine's hardware; `blind` is set also if torch does not answer."""
    stats = os.statvfs(SHM)
    host, shm = host_bytes(), stats.f_blocks * stats.f_frsize
    cores = len(os.sched_getaffinity(0))
    if not (driver := driver_version()):
        return Machine(host=host, shm=shm, cores=cores)
    try:
        seen, blind = gpus_seen(), ""
    except UmbraError as error:
        seen, blind = GpusSeen([]), silent(error)
    vllm = importlib.util.find_spec("vllm") is not None
    sizes = tuple(gpu.total for gpu in seen.gpus)
    name = seen.gpus[0].name if seen.gpus else ""
    blind = "" if sizes else blind or why_blind(seen, driver)
    return Machine(sizes, name, host, shm, vllm, blind, cores)


def kind_of(device: str, *, gpu: bool) -> str:
    """Return "cuda" or "cpu": the meaning of a device name on a machine with or without GPUs."""
    name = device.partition(":")[0]
    return ("cuda" if gpu else "cpu") if name == "auto" else name


def first_gpu(device: str) -> int:
    number = device.partition(":")[2]
    return int(number) if number.isdigit() else 0
