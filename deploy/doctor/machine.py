"""The facts of this machine, each within a deadline, and the checks of them."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import msgspec
import zmq

from umbra.deploy.doctor import judge
from umbra.deploy.doctor.diagnosis import Check, Diagnosis, unmade
from umbra.deploy.doctor.judge import GpusSeen
from umbra.deploy.env_command import NVIDIA, PACKAGES, version_of
from umbra.deploy.preflight import check_run, run_endpoints
from umbra.proto.access import KEY_ROLES, KeyRole
from umbra.proto.errors import ERROR_PREFIX, StartupError, UmbraError, UsageError
from umbra.proto.net.keys import SECRET, is_local, load_keys
from umbra.proto.sockets import check_port_free
from umbra.services.config import RunConfig
from umbra.services.process.host_memory import available_bytes, host_bytes
from umbra.services.weights.arena import SHM

PROGRAM_S = 180.0  # for a process that loads torch, on a slow disk
SLOW_S = PROGRAM_S + 10  # for a check with such a process
WRITTEN = 64 << 20  # bytes, to measure a disk
BLOCK = 4 << 20
WRITE_S = 5.0  # at most
MADE_FOR = ("umbra-rl", "vllm", "transformers", "torch")  # whose requirements are looked at
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
TIMEX_BYTES = 256  # more than struct timex has
TIMEX_MAXERROR = 3  # its fourth long: microseconds


class Gpus:
    """What torch sees, asked by a process of its own, once for all checks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: GpusSeen | UmbraError | None = None

    def facts(self) -> GpusSeen:
        """What there is.

        Raises:
            UmbraError: it could not be asked; says why.
        """
        with self._lock:
            if self._found is None:
                output = _program("-m", "umbra.deploy.doctor.probe")
                is_answer = isinstance(output, bytes)
                self._found = (
                    msgspec.json.decode(output, type=GpusSeen) if is_answer else UmbraError(output)
                )
        if isinstance(self._found, UmbraError):
            raise self._found
        return self._found


def machine_checks(gpus: Gpus, keys: Path | None = None, used: int = 0) -> list[Check]:
    """What does not depend on a run file.

    Args:
        keys: folder of the run's keys, if it is known to have any.
        used: how many GPUs the run uses here.
    """
    return [
        Check("python", lambda: Diagnosis("python", "ok", sys.version.partition(" ")[0])),
        Check("packages", _packages),
        Check("encryption", lambda: judge.curve(zmq.has("curve"), zmq.pyzmq_version())),
        Check("driver", partial(_driver, gpus), SLOW_S),
        Check("GPUs", lambda: judge.gpus(gpus.facts(), bool(driver_version()), used), SLOW_S),
        Check("NCCL", lambda: judge.nccl(gpus.facts()), SLOW_S),
        Check("interface", _interfaces),
        Check("open files", lambda: judge.open_files(_most_files())),
        Check("clock", _clock),
        *([Check("keys", partial(look_at_keys, keys, ""))] if keys else []),
    ]


def room_checks(gpus: Gpus, run_file: Path | None, overrides: Sequence[str]) -> list[Check]:
    """Whether memory is enough for the run of `run_file`, or at all."""
    return [Check("memory", partial(_memory, gpus, run_file, overrides), 2 * SLOW_S)]


def run_checks(config: RunConfig) -> list[Check]:
    """What the run of `config` needs of this machine, memory aside."""
    folder = Path(config.security.keys) if config.security.keys else None
    public = next((one for one in run_endpoints(config) if not is_local(one)), "")
    return [
        Check("run file", partial(_run_file, config), PROGRAM_S),
        Check("ports", partial(look_at_ports, run_endpoints(config))),
        Check("keys", partial(look_at_keys, folder, public)),
        Check("disk", partial(look_at_disk, Path(config.run.dir)), 4 * WRITE_S),
    ]


def installed() -> dict[str, str]:
    """The versions of the packages that matter, by name."""
    versions = {name: version_of(name) for name in ("umbra-rl", *PACKAGES)}
    return {name: version for name, version in versions.items() if version is not None}


def driver_version() -> str:
    """Of NVIDIA's kernel module; empty if there is none."""
    try:
        text = (NVIDIA / "version").read_text(encoding="utf-8")
    except OSError:
        return ""
    words = text.partition("\n")[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def look_at_ports(endpoints: Sequence[str]) -> list[Diagnosis]:
    """Whether nobody listens at those of `endpoints` that name a port."""
    findings: list[Diagnosis] = []
    for endpoint in endpoints:
        if endpoint.rpartition(":")[2] in ("*", "0"):
            continue
        taken = ""
        try:
            check_port_free(endpoint)
        except StartupError as error:
            taken = str(error)
        findings.append(judge.port(endpoint, taken))
    return findings or [Diagnosis("port", "ok", "free ones are chosen")]


def look_at_disk(folder: Path) -> list[Diagnosis]:
    """Room and speed at `folder`, or where it will be made; a file without a name is written."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            block, begin, written = os.urandom(BLOCK), time.monotonic(), 0
            while written < WRITTEN and time.monotonic() - begin < WRITE_S:
                written += file.write(block)
                os.fsync(file.fileno())
            rate = written / (time.monotonic() - begin)
            begin = time.monotonic()
            file.write(b"x")
            os.fsync(file.fileno())
            sync_s = time.monotonic() - begin
    except OSError as error:
        remedy = f"give this user a run.dir that it may write to, with room ({error.strerror})"
        return [Diagnosis("disk space", "problem", f"{there} cannot be written to", remedy)]
    return judge.disk(str(there), shutil.disk_usage(there).free, rate, sync_s)


def shared_memory() -> tuple[int, int]:
    """Bytes free in /dev/shm, and in all."""
    found = os.statvfs(SHM)
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _packages() -> list[Diagnosis]:
    try:
        from packaging.requirements import Requirement  # comes with torch's companions
    except ImportError:
        return [unmade("packages", "the package `packaging` is not installed")]
    there = installed()
    needs: dict[str, list[str]] = {}
    for name in MADE_FOR:
        if name not in there:
            continue
        for text in requires(name) or ():
            wanted = Requirement(text)
            marker = wanted.marker
            # An extra of ours counts if what it asks for is there at all.
            extras = {"extra": "" if name != "umbra-rl" else _extra(text)}
            if wanted.name in there and (marker is None or marker.evaluate(extras)):
                needs.setdefault(name, []).append(f"{wanted.name}{wanted.specifier}")
    return judge.fit(there, needs)


def _extra(requirement: str) -> str:
    return (
        requirement.rpartition("extra == ")[2].strip("\"' )") if "extra ==" in requirement else ""
    )


def _program(*arguments: str) -> bytes | str:
    """The output of a Python program of ours; a sentence if it has failed."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, timeout=PROGRAM_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {PROGRAM_S:g} s"
    if done.stdout:
        return done.stdout
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    missing = "torch is not installed" if "No module named 'torch'" in last else last
    return missing or f"it ended with code {done.returncode}"


def _driver(gpus: Gpus) -> Diagnosis:
    cuda = ""
    with suppress(UmbraError):
        cuda = gpus.facts().cuda
    return judge.driver(driver_version(), cuda)


def _interfaces() -> list[Diagnosis]:
    names = [name for _, name in socket.if_nameindex()]
    return [
        judge.interface(variable, os.environ.get(variable, ""), names)
        for variable in SOCKET_VARIABLES
        if variable in os.environ or variable == SOCKET_VARIABLES[0]
    ]


def _most_files() -> int:
    """Files that a process may have open: Umbra raises its own limit to the hard one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if most == resource.RLIM_INFINITY else most


def _clock() -> Diagnosis:
    timex = (ctypes.c_long * (TIMEX_BYTES // 8))()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))  # modes 0: only look
    if state < 0:
        return unmade("clock", f"adjtimex: {os.strerror(ctypes.get_errno())}")
    return judge.clock(state != UNSYNCHRONISED, timex[TIMEX_MAXERROR] / 1e6)


def _memory(gpus: Gpus, run_file: Path | None, overrides: Sequence[str]) -> list[Diagnosis]:
    """Shared and host memory; with a run file, against its estimate, whose faults are told too."""
    shm, host = shared_memory(), (available_bytes(), host_bytes())
    estimate: dict[str, Any] = {}
    why_not = ""
    if run_file is not None:
        sets = [text for override in overrides for text in ("--set", override)]
        output = _program("-m", "umbra", "estimate", str(run_file), "--json", *sets)
        if isinstance(output, str):
            why_not = output.removeprefix(ERROR_PREFIX)
        else:
            estimate = msgspec.json.decode(output)
    found = [
        judge.shared_memory(*shm, estimate.get("shm_bytes")),
        judge.host_memory(*host, estimate.get("host_bytes")),
    ]
    if why_not:
        found.append(unmade("estimate", why_not))
    found += [judge.refusal("estimate", fault) for fault in estimate.get("faults", ())]
    if "gpus" in estimate:
        found.append(_enough(gpus, 1 + max(map(int, estimate["gpus"]), default=-1)))
    return found


def _enough(gpus: Gpus, needed: int) -> Diagnosis:
    try:
        have = len(gpus.facts().gpus)
    except UmbraError as error:
        return unmade("GPUs of the run", str(error))
    if have >= needed:
        return Diagnosis("GPUs of the run", "ok", f"{needed} of {have}")
    return Diagnosis(
        "GPUs of the run", "problem", f"it uses {needed}, {have} are here",
        "lower generator.count or trainer.ranks, or add GPUs",
    )  # fmt: skip


def _run_file(config: RunConfig) -> Diagnosis:
    try:
        check_run(config, download=False)
    except (UsageError, StartupError) as error:
        return judge.refusal("run file", str(error))
    return Diagnosis("run file", "ok", "keys, values and files are good")


def look_at_keys(folder: Path | None, public: str) -> Diagnosis:
    if folder is None:
        return judge.keys("", {}, (), open_to=public)
    held: list[KeyRole] = [role for role in KEY_ROLES if (folder / f"{role}{SECRET}").exists()]
    faults: dict[str, str] = {}
    for role in held or KEY_ROLES[:1]:
        try:
            load_keys(folder, role)
        except UsageError as error:
            faults[role] = str(error)
    return judge.keys(str(folder), faults, held, open_to=public)
