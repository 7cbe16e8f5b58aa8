"""What the facts of a machine mean for a run: measured values in, findings out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from umbra.deploy.doctor.diagnosis import Diagnosis, Result, unmade
from umbra.services.reporting.tables import size

GIB = 1 << 30
MIB = 1 << 20
# The oldest driver on which what is built for a major version of CUDA runs (NVIDIA's "CUDA
# compatibility", table of minor version compatibility).
LEAST_DRIVER = {12: (525, 60), 13: (580,)}
LEAST_FILES, ENOUGH_FILES = 1_024, 16_384  # each member has several sockets at the buffer
SMALL_SHM = GIB  # Docker gives 64 MiB unless told otherwise
DISK_FULL, DISK_LOW = 2 * GIB, 20 * GIB
SLOW_WRITES = 50 * MIB  # per second
SLOW_SYNC_S = 0.1  # the buffer waits for one before it acknowledges
SKEW_S = 1.0  # as of which members warn


class Gpu(msgspec.Struct, frozen=True):
    """One that torch sees; bytes."""

    name: str
    total: int
    free: int


class GpusSeen(msgspec.Struct, frozen=True):
    """What a process of its own found out about GPUs.

    Attributes:
        cuda: of torch's build, such as 12.9; empty: a build without CUDA.
        apart: pairs of GPUs without access to each other's memory.
        torch_nccl: why torch cannot use NCCL; empty: it can.
        hub_nccl: the same of the plane `nccl`.
    """

    torch: str
    cuda: str
    why_not: str
    gpus: list[Gpu]
    apart: list[tuple[int, int]]
    torch_nccl: str
    hub_nccl: str


def refusal(check: str, sentence: str) -> Diagnosis:
    """The problem that the sentence of an error tells; its last part says what to do."""
    what, _, remedy = sentence.rpartition("; " if "; " in sentence else ": ")
    return Diagnosis(check, "problem", what or sentence, remedy)


def fit(installed: Mapping[str, str], needs: Mapping[str, Sequence[str]]) -> list[Diagnosis]:
    """Whether the packages that are installed are what the others were made for.

    Args:
        installed: version by name.
        needs: requirements by the name of who has them, as its metadata has them.
    """
    from packaging.requirements import Requirement  # comes with what needs torch

    found: list[Diagnosis] = []
    for by, texts in needs.items():
        for text in texts:
            wanted = Requirement(text)
            version = installed.get(wanted.name)
            if version is None or wanted.specifier.contains(version, prereleases=True):
                continue
            exact = f"{wanted.name}{wanted.specifier}"
            fact = f"{by} {installed[by]} needs {exact}, {version} is installed"
            found.append(Diagnosis("packages", "problem", fact, f"pip install '{exact}'"))
    cupy = sorted(name for name in installed if name.startswith("cupy-cuda"))
    if len(cupy) > 1:
        remedy = f"pip uninstall {' '.join(cupy)}, then install the one for your driver"
        found.append(
            Diagnosis("packages", "problem", f"{' and '.join(cupy)} share one folder", remedy)
        )
    listed = ", ".join(f"{name} {version}" for name, version in installed.items())
    return found or [Diagnosis("packages", "ok", listed)]


def curve(has: bool, version: str) -> Diagnosis:
    """Whether ZeroMQ can encrypt."""
    if has:
        return Diagnosis("encryption", "ok", f"pyzmq {version} has CURVE")
    remedy = (
        "install pyzmq from its wheel (pip install --force-reinstall --only-binary :all: pyzmq)"
    )
    return Diagnosis("encryption", "problem", f"pyzmq {version} was built without CURVE", remedy)


def driver(version: str, cuda: str) -> Diagnosis:
    """Whether NVIDIA's driver runs what torch was built for."""
    if not version:
        return unmade("driver", "there is no NVIDIA driver here")
    least = LEAST_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None
    if least is None:
        return Diagnosis("driver", "ok", f"NVIDIA {version}; torch is not built for CUDA")
    have = tuple(int(part) for part in version.split(".") if part.isdigit())
    needed = ".".join(map(str, least))
    if have >= least:
        return Diagnosis("driver", "ok", f"NVIDIA {version} runs CUDA {cuda}")
    return Diagnosis(
        "driver", "problem", f"NVIDIA {version}, torch is built for CUDA {cuda}",
        f"install driver {needed} or newer, or a torch for an older CUDA",
    )  # fmt: skip


def gpus(found: GpusSeen, driver_there: bool, needed: int) -> list[Diagnosis]:
    """Whether there are as many GPUs as the run uses, free, with access to each other."""
    count = len(found.gpus)
    if not count:
        if not needed and not driver_there:
            return [Diagnosis("GPUs", "ok", "none")]
        remedy = (
            "give this process the GPUs (docker: --gpus all and NVIDIA's container toolkit; see "
            "CUDA_VISIBLE_DEVICES), or install a torch that is built for this driver's CUDA"
        )
        return [Diagnosis("GPUs", "problem", f"torch sees none: {found.why_not}", remedy)]
    names = ", ".join(sorted({gpu.name for gpu in found.gpus}))
    fact = f"{count} ({names}), {size(min(gpu.free for gpu in found.gpus))} free on each at least"
    result: Result = "ok"
    remedy = ""
    if count < needed:
        result, fact = "problem", f"{count} ({names}), the run uses {needed}"
        remedy = "lower generator.count or trainer.ranks, or add GPUs"
    elif taken := [i for i, gpu in enumerate(found.gpus) if gpu.free < 0.9 * gpu.total]:
        busy = ", ".join(map(str, taken))
        result, remedy = "warning", f"see with nvidia-smi who has memory of GPU {busy}"
    findings = [Diagnosis("GPUs", result, fact, remedy)]
    if count > 1:
        findings.append(_peers(found.apart))
    return findings


def _peers(apart: Sequence[tuple[int, int]]) -> Diagnosis:
    if not apart:
        return Diagnosis("GPU to GPU", "ok", "all reach each other's memory")
    pairs = ", ".join(f"{a}-{b}" for a, b in apart[:4]) + (" ..." if len(apart) > 4 else "")
    return Diagnosis(
        "GPU to GPU", "warning", f"no access between {pairs}: through host memory, slower",
        "give one process's ranks GPUs that reach each other (nvidia-smi topo -m); on a virtual "
        "machine have ACS and IOMMU set up for it",
    )  # fmt: skip


def nccl(found: GpusSeen) -> list[Diagnosis]:
    """Whether trainer and hub can use NCCL."""
    if not found.gpus:
        return [unmade("NCCL", "there are no GPUs")]
    findings: list[Diagnosis] = []
    if len(found.gpus) > 1 and found.torch_nccl:
        remedy = "install a torch that is built for CUDA, for Linux"
        findings.append(Diagnosis("NCCL", "problem", f"torch: {found.torch_nccl}", remedy))
    if found.hub_nccl:
        remedy = "only the plane nccl needs it, weights travel over others: " + found.hub_nccl
        findings.append(Diagnosis("NCCL", "warning", "the weight hub has none", remedy))
    return findings or [Diagnosis("NCCL", "ok", "torch and the weight hub have it")]


def interface(variable: str, value: str, names: Collection[str]) -> Diagnosis:
    """Whether the interface that NCCL or gloo is told to use exists.

    NCCL's variable has prefixes of names, `=` before them for whole names, `^` for all others;
    gloo's has whole names.
    """
    check, there = "interface", ", ".join(sorted(names))
    if not value:
        return Diagnosis(check, "ok", f"{variable} is not set: one of {there} is chosen")
    text, inverted = value.removeprefix("^"), value.startswith("^")
    exact = text.startswith("=") or variable.startswith("GLOO")
    listed = [part for part in text.removeprefix("=").split(",") if part]
    meant = {
        name
        for name in names
        for one in listed
        if name == one or (not exact and name.startswith(one))
    }
    if inverted:
        meant = set(names) - meant - {"lo"}
    if meant:
        return Diagnosis(check, "ok", f"{variable} = {value}: {', '.join(sorted(meant))}")
    return Diagnosis(
        check, "problem", f"{variable} = {value}, there is only {there}",
        f"set {variable} to one of them, or unset it",
    )  # fmt: skip


def shared_memory(free: int, total: int, needed: int | None) -> Diagnosis:
    """Whether the versions of the weights have room in /dev/shm."""
    fact = f"{size(free)} free of {size(total)}"
    remedy = (
        "make it larger (docker: --shm-size, compose: shm_size, or mount -o remount,size=...), or "
        "remove what ended runs left there (/dev/shm/umbra-*)"
    )
    if needed is None:
        result: Result = "warning" if free < SMALL_SHM else "ok"
        return Diagnosis("/dev/shm", result, fact, remedy if result == "warning" else "")
    fact += f", the run needs {size(needed)}"
    if free < needed:
        return Diagnosis("/dev/shm", "problem", fact, remedy)
    return Diagnosis("/dev/shm", "ok", fact)


def host_memory(available: int, total: int, needed: int | None) -> Diagnosis:
    """Whether the host has the memory that is estimated."""
    fact = f"{size(available)} free of {size(total)}"
    if needed is None:
        return Diagnosis("memory", "ok", fact)
    fact += f", the run needs {size(needed)}"
    if available < needed:
        remedy = "end what else runs here, or see `umbra estimate` for what takes most"
        return Diagnosis("memory", "problem", fact, remedy)
    return Diagnosis("memory", "ok", fact)


def open_files(most: int) -> Diagnosis:
    """Whether a process may have as many files and sockets open as a large run takes."""
    fact = f"at most {most} per process"
    if most >= ENOUGH_FILES:
        return Diagnosis("open files", "ok", fact)
    remedy = "raise it: ulimit -Hn 65536 (docker: --ulimit nofile=65536, systemd: LimitNOFILE)"
    return Diagnosis("open files", "problem" if most < LEAST_FILES else "warning", fact, remedy)


def disk(folder: str, free: int, per_s: float, sync_s: float) -> list[Diagnosis]:
    """Whether the run's folder has room, and how fast it is written to."""
    room: Result = "ok" if free >= DISK_LOW else "warning" if free >= DISK_FULL else "problem"
    remedy = "free some, or set run.dir elsewhere: checkpoints and the store go there"
    slow = per_s < SLOW_WRITES or sync_s > SLOW_SYNC_S
    return [
        Diagnosis(
            "disk space", room, f"{size(free)} free at {folder}", "" if room == "ok" else remedy
        ),
        Diagnosis(
            "disk speed", "warning" if slow else "ok",
            f"{size(per_s)}/s, a sync takes {1000 * sync_s:.1f} ms",
            "set run.dir to a faster disk: the buffer syncs before it acknowledges answers"
            if slow else "",
        ),
    ]  # fmt: skip


def port(endpoint: str, taken: str) -> Diagnosis:
    """Whether the run can listen at `endpoint`; `taken` says why not."""
    if not taken:
        return Diagnosis("port", "ok", f"{endpoint} is free")
    return Diagnosis(
        "port",
        "problem",
        taken,
        f"see who it is with: ss -tlnp | grep {endpoint.rpartition(':')[2]}",
    )


def keys(
    folder: str, faults: Mapping[str, str], roles: Sequence[str], *, open_to: str
) -> Diagnosis:
    """Whether the keys of a run are there, private and sound.

    Args:
        folder: of the keys; empty: the run has none.
        faults: what is wrong with them, by role.
        roles: whose secret halves are there.
        open_to: without keys: an address that other machines reach; empty if there is none.
    """
    if not folder:
        if not open_to:
            return Diagnosis("keys", "ok", "none: only this machine can connect")
        remedy = "make keys (umbra keys FOLDER), and name the folder in security.keys"
        return Diagnosis("keys", "warning", f"none, and others can connect to {open_to}", remedy)
    if faults:
        return refusal("keys", next(iter(faults.values())))
    return Diagnosis("keys", "ok", f"{folder}: {', '.join(roles)}")


def clock(synchronised: bool, error_s: float) -> Diagnosis:
    """Whether the kernel takes its clock for right."""
    if synchronised:
        return Diagnosis("clock", "ok", f"synchronised, within {1000 * error_s:.0f} ms")
    remedy = "start chrony, systemd-timesyncd or another NTP client on the host"
    return Diagnosis("clock", "warning", "not synchronised with any other", remedy)
