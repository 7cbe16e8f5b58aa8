"""This machine: what it has, what torch sees of it, and findings about what a run lacks here.

Nothing here needs torch: `aside.py` is asked in a process of its own.
"""

from __future__ import annotations

import importlib.util
import math
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from umbra.deploy.prepare.preflight import nearest_place, run_endpoints
from umbra.proto.access import KEY_ROLES, KeyRole
from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.proto.net.keys import SECRET, is_local, load_keys
from umbra.proto.records import PROTOCOL_MAJOR, PROTOCOL_MINOR
from umbra.proto.sockets import check_port_free
from umbra.services.config import RunConfig
from umbra.services.process.child import child_error, describe_exit, own_exit_code, python_argv
from umbra.services.process.host import available_bytes, driver_version, host_bytes, versions_line
from umbra.services.reporting import aligned, size
from umbra.services.weights.arena import SHM
from umbra.services.weights.planes.plane import PLANES, unavailable

GIB = 1 << 30
# GiB of `torch.cuda.get_device_properties(0).total_memory`.
GPUS: dict[str, float] = {
    "a10-24": 22.0, "a100-40": 39.4, "a100-80": 79.2, "b200-180": 178.3, "h100-80": 79.1,
    "h200-141": 139.8, "l4-24": 22.0, "l40s-48": 44.4, "rtx4090-24": 23.5, "rtx5090-32": 31.3,
}  # fmt: skip
PROGRAM_S = 180.0  # for a process that loads torch, on a slow disk
REQUEST_S = 1800.0  # for one that also builds a model, which ends itself far earlier
LEAST_DRIVER = {12: 525, 13: 580}  # by CUDA major (NVIDIA, "CUDA minor version compatibility")

T = TypeVar("T")


class Machine(msgspec.Struct, frozen=True):
    """Bytes of a host's memory and /dev/shm (None: unknown), and of each of its GPUs.

    `name` is that of the first GPU, `vllm` whether vLLM is installed, `blind` why torch sees no GPU
    of a driver (see `why_blind`), `cores` how many CPUs this process may use (0: unknown).
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


class GpuReport(msgspec.Struct, frozen=True):
    """The GPUs that torch sees, and what says `why_not` if it sees none.

    `torch` is its version (empty: it did not answer), `cuda` of the CUDA it is built for (empty:
    for CPUs), `node` whether the process is given a device of the driver, `visible` its
    CUDA_VISIBLE_DEVICES.
    """

    gpus: list[Gpu]
    why_not: str = ""
    torch: str = ""
    cuda: str = ""
    node: bool = True
    visible: str | None = None


def ask_aside(kind: type[T], request: object = None) -> T:
    """Return the answer of `aside` to a request; UmbraError with the reason if there is none."""
    argv = python_argv("umbra.deploy.check.aside")
    data = b"" if request is None else msgspec.json.encode(request)
    timeout_s = PROGRAM_S if request is None else REQUEST_S
    try:
        process = subprocess.run(argv, input=data, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise UmbraError(f"it took longer than {timeout_s:g} s") from None
    if code := process.returncode:
        last = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise child_error(last or describe_exit(code), own_exit_code(code))
    return msgspec.json.decode(process.stdout, type=kind)


@cache
def gpu_report() -> GpuReport:
    """Return the GPUs that torch sees; none, and the reason, if it does not answer."""
    try:
        return ask_aside(GpuReport)
    except UmbraError as error:
        return GpuReport([], f"torch was asked for them, and {error}")


def why_blind(report: GpuReport, driver: str) -> str:
    """Return why torch sees no GPU of this driver, and after the last semicolon the remedy."""
    least = LEAST_DRIVER.get(int(report.cuda.partition(".")[0] or 0), 0)
    major, visible = driver.partition(".")[0], report.visible
    variable = f'CUDA_VISIBLE_DEVICES = "{visible}"'
    if not report.torch:
        return f"{report.why_not}; see whether nvidia-smi answers, and torch loads"
    if not report.cuda:
        return (
            f"torch {report.torch} is built for CPUs; install one from PyPI (CUDA 13, driver 580 "
            "or newer) or from PyTorch's cu12 index (driver 525)"
        )
    if not report.node:
        return (
            "this process has no /dev/nvidiactl, as in a container without GPUs; give it GPUs "
            "(docker: --gpus all, SLURM: --gres=gpu:1, Kubernetes: nvidia.com/gpu)"
        )
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return f"{variable} hides all GPUs; unset it, or name some that nvidia-smi lists"
    if major.isdigit() and int(major) < least:
        return (
            f"driver {driver} is too old for torch {report.torch}, which is built for CUDA "
            f"{report.cuda} and needs {least} or newer ({report.why_not}); update the driver, or "
            "install a torch from PyTorch's index for a CUDA that this driver has"
        )
    hidden = f" with {variable}" if visible else ""
    return f"{report.why_not}{hidden}; see whether nvidia-smi lists the GPUs, and which"


def this_machine() -> Machine:
    """Return this machine's hardware; `blind` is set also if torch does not answer."""
    stats, driver = os.statvfs(SHM), driver_version()
    report = gpu_report() if driver else GpuReport([])
    return Machine(
        gpus=tuple(gpu.total for gpu in report.gpus),
        name=report.gpus[0].name if report.gpus else "",
        host=host_bytes(),
        shm=stats.f_blocks * stats.f_frsize,
        vllm=bool(driver) and importlib.util.find_spec("vllm") is not None,
        blind=why_blind(report, driver) if driver and not report.gpus else "",
        cores=len(os.sched_getaffinity(0)),
    )


def kind_of(device: str, *, gpu: bool) -> str:
    """Return "cuda" or "cpu": the meaning of a device name on a machine with or without GPUs."""
    name = device.partition(":")[0]
    return ("cuda" if gpu else "cpu") if name == "auto" else name


def first_gpu(device: str) -> int:
    number = device.partition(":")[2]
    return int(number) if number.isdigit() else 0


LEAST_FILES, ENOUGH_FILES = 1_024, 16_384  # each member has several sockets at the buffer
SMALL_SHM = GIB  # Docker gives 64 MiB unless told otherwise
DISK_FULL, DISK_LOW = 2 * GIB, 20 * GIB

Level = Literal["ok", "warning", "problem", "not looked at"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about `subject`; `remedy` is empty where there is nothing to do."""

    subject: str
    level: Level
    text: str
    remedy: str = ""


def graded(
    subject: str, text: str, remedy: str, *, problem: bool, warning: bool = False
) -> Finding:
    level: Level = "problem" if problem else "warning" if warning else "ok"
    return Finding(subject, level, text, remedy if level != "ok" else "")


def refusal(subject: str, sentence: str) -> Finding:
    """Return the problem in the sentence of an error, whose last part is the remedy."""
    problem, _, remedy = sentence.rpartition("; " if "; " in sentence else ": ")
    return Finding(subject, "problem", problem or sentence, remedy)


def as_text(checks: Sequence[Finding]) -> list[str]:
    """Return lines for people: the findings, then what to do, problems first."""
    lines = aligned((check.subject, check.level, check.text) for check in checks)
    todo = [check for level in ("problem", "warning") for check in checks if check.level == level]
    remedies = [f"- {check.subject}: {check.remedy}" for check in todo if check.remedy]
    return [*lines, "", *(["What to do:", *remedies] if remedies else ["Nothing to do."])]


def findings(
    config: RunConfig | None = None,
    *,
    gpus: int = 0,
    shm: int | None = None,
    host: int | None = None,
) -> Iterator[Finding]:
    """Yield findings on this machine, for the run of `config` if there is one.

    `gpus`, and bytes of `shm` and `host` memory, are what the run needs; None is unknown.
    """
    protocol = f"protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    yield Finding("versions", "ok", f"{versions_line()}, {protocol}")
    if config is None or not for_cpus(config):
        yield find_gpus(gpus)
    for name in PLANES:
        reason = unavailable(name)
        yield Finding(f"plane {name}", "not looked at" if reason else "ok", reason or "available")
    stats = os.statvfs(SHM)
    yield shared_memory(stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize, shm)
    yield host_memory(available_bytes(), host_bytes(), host)
    yield open_files()
    if config is not None:
        endpoints, own = run_endpoints(config), config.security.keys
        folder = Path(own) if own else None
        yield from ports(endpoints)
        yield keys(folder, next((address for address in endpoints if not is_local(address)), ""))
        yield disk(Path(config.run.dir))


def find_gpus(needed: int) -> Finding:
    """Check that there are as many free GPUs as the run uses; no driver counts as none."""
    driver = driver_version()
    if not driver and not needed:
        return Finding("GPUs", "ok", "none")
    return judge_gpus(gpu_report(), driver, needed)


def for_cpus(config: RunConfig) -> bool:
    """True if the run is to compute on CPUs by name, whatever GPUs there are."""
    devices = {config.trainer.device, config.generator.device}
    scores = {"ref_logp", "logp"} & {*config.buffer.stages}
    return devices | ({config.scorer.device} if scores else set()) == {"cpu"}


def judge_gpus(report: GpuReport, driver: str, needed: int) -> Finding:
    if not report.gpus:
        return refusal("GPUs", f"torch sees none: {why_blind(report, driver)}")
    names = ", ".join(sorted({gpu.name for gpu in report.gpus}))
    count, free = len(report.gpus), min(gpu.free for gpu in report.gpus)
    if count < needed:
        remedy = "lower generator.count or trainer.ranks, or add GPUs"
        return Finding("GPUs", "problem", f"{count} ({names}), the run uses {needed}", remedy)
    text = f"{count} ({names}, driver {driver}), {size(free)} free on each at least"
    if busy := [str(i) for i, gpu in enumerate(report.gpus) if gpu.free < 0.9 * gpu.total]:
        remedy = f"see with nvidia-smi who has memory of GPU {', '.join(busy)}"
        return Finding("GPUs", "warning", text, remedy)
    return Finding("GPUs", "ok", text)


def shared_memory(free: int, total: int, needed: int | None) -> Finding:
    remedy = (
        "make it larger (docker: --shm-size, compose: shm_size, or mount -o remount,size=...), or "
        "remove what ended runs left there (/dev/shm/umbra-*)"
    )
    text, small = _amount(free, total, needed), not needed and free < SMALL_SHM
    return graded("/dev/shm", text, remedy, problem=free < (needed or 0), warning=small)


def host_memory(available: int, total: int, needed: int | None) -> Finding:
    remedy = "end what else runs here, or see `umbra check --json` for what takes most"
    text = _amount(available, total, needed)
    return graded("host memory", text, remedy, problem=available < (needed or 0))


def _amount(free: int, total: int, needed: int | None) -> str:
    demand = "" if needed is None else f", the run needs {size(needed)}"
    return f"{size(free)} free of {size(total)}{demand}"


def open_files() -> Finding:
    """Check the hard limit of open files, to which Umbra raises its own."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = math.inf if limit == resource.RLIM_INFINITY else limit
    remedy = "raise it: ulimit -Hn 65536 (docker: --ulimit nofile=65536, systemd: LimitNOFILE)"
    few, text = most < LEAST_FILES, f"at most {limit} per process"
    return graded("open files", text, remedy, problem=few, warning=most < ENOUGH_FILES)


def disk(folder: Path) -> Finding:
    """Check room and rights at `folder`, or where it will be made."""
    place = nearest_place(folder)
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        remedy = f"give this user a run.dir that it may write to, with room ({error.strerror})"
        return Finding("disk", "problem", f"{place} cannot be written to", remedy)
    free = shutil.disk_usage(place).free
    remedy = "free some, or set run.dir elsewhere: checkpoints and the store go there"
    text, low = f"{size(free)} free at {place}", free < DISK_LOW
    return graded("disk", text, remedy, problem=free < DISK_FULL, warning=low)


def ports(endpoints: Sequence[str]) -> Iterator[Finding]:
    """Check that nobody listens at the `endpoints` that name a port."""
    numbers = {endpoint: endpoint.rpartition(":")[2] for endpoint in endpoints}
    fixed = [endpoint for endpoint in endpoints if numbers[endpoint] not in ("*", "0")]
    for endpoint in fixed:
        try:
            check_port_free(endpoint)
            yield Finding("port", "ok", f"{endpoint} is free")
        except StartupError as error:
            remedy = f"see who it is with: ss -tlnp | grep {numbers[endpoint]}"
            yield Finding("port", "problem", str(error), remedy)
    if not fixed:
        yield Finding("port", "ok", "free ones are chosen")


def keys(folder: Path | None, public: str) -> Finding:
    """Check that the keys in `folder`, if any, are there, private and sound.

    `public` is an address of the run that other machines reach; empty if there is none.
    """
    if folder is None:
        if not public:
            return Finding("keys", "ok", "none: only this machine can connect")
        remedy = "make keys (umbra keys FOLDER), and name the folder in security.keys"
        return Finding("keys", "warning", f"none, and others can connect to {public}", remedy)
    roles: list[KeyRole] = [role for role in KEY_ROLES if (folder / f"{role}{SECRET}").exists()]
    for role in roles or KEY_ROLES[:1]:
        try:
            load_keys(folder, role)
        except UsageError as error:
            return refusal("keys", str(error))
    return Finding("keys", "ok", f"{folder}: {', '.join(roles)}")
