"""Which plane joins a hub and a receiver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from umbra.proto.errors import RejectedError, UsageError
from umbra.proto.records import GpuFacts
from umbra.services.weights.gpu.cuda import cuda_unavailable, nccl_unavailable

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a pair: which /dev/shm it sees, and its GPU."""

    host: str
    gpu: GpuFacts | None = None


@dataclass(frozen=True, slots=True)
class Plane:
    """A way for weights to travel.

    Args:
        name: as in the configuration and on the wire.
        available: why this process cannot use it; None if it can.
        joins: why it cannot connect two ends (the hub and a receiver); None if it can.
    """

    name: str
    available: Callable[[], str | None]
    joins: Callable[[Side, Side], str | None]


def mismatch(ours: GpuFacts, theirs: GpuFacts) -> str | None:
    """Why these two must not enter NCCL together (they would hang); None if they may."""
    if theirs.nccl == 0 or ours.nccl == 0:
        return f"there is no NCCL {'there' if theirs.nccl == 0 else 'here'}"
    if ours.nccl != theirs.nccl:
        return f"NCCL {theirs.nccl} there, {ours.nccl} here: install the same nvidia-nccl"
    if ours.cuda_major != theirs.cuda_major:
        return f"CUDA {theirs.cuda_major} there, {ours.cuda_major} here"
    if ours.environment != theirs.environment:
        names = sorted(ours.variables.keys() | theirs.variables.keys())
        differing = [
            name for name in names if ours.variables.get(name) != theirs.variables.get(name)
        ]
        return f"other environment variables: {', '.join(differing) or 'unknown ones'}"
    return None


def _available() -> None:
    return None


def _anywhere(_hub: Side, _receiver: Side) -> None:
    return None


def _same_host(hub: Side, receiver: Side) -> str | None:
    return None if hub.host == receiver.host else "the hub's /dev/shm is not the receiver's"


def _without_gpu(receiver: Side) -> str:
    return "the receiver has no GPU" if receiver.gpu is None else "the hub has no GPU"


def _same_gpu(hub: Side, receiver: Side) -> str | None:
    if hub.gpu is None or receiver.gpu is None:
        return _without_gpu(receiver)
    if (other_host := _same_host(hub, receiver)) is not None:
        return other_host  # there may be a GPU at the same place on its bus
    if hub.gpu.device != receiver.gpu.device:
        return "the receiver is on another GPU than weight_hub.device"
    return None


def _same_nccl(hub: Side, receiver: Side) -> str | None:
    if hub.gpu is None or receiver.gpu is None:
        return _without_gpu(receiver)
    return mismatch(hub.gpu, receiver.gpu)


# In the hub's order of preference.
PLANES: dict[str, Plane] = {
    plane.name: plane
    for plane in (
        Plane("cuda_ipc", cuda_unavailable, _same_gpu),
        Plane("shm", _available, _same_host),
        Plane("nccl", nccl_unavailable, _same_nccl),
        Plane("tcp", _available, _anywhere),
    )
}
GPU_PLANES = ("cuda_ipc", "nccl")


def check_plane(configured: str) -> None:
    """Check the configuration's `weight_hub.plane` at the start.

    Raises:
        UsageError: it names a plane that this hub cannot use.
    """
    if configured == AUTO:
        return
    plane = PLANES.get(configured)
    reason = plane.available() if plane else "there is no such plane"
    if reason is not None:
        usable = ", ".join(p.name for p in PLANES.values() if p.available() is None)
        raise UsageError(
            f'weight_hub.plane = "{configured}" cannot be used: {reason}; set "{AUTO}" or one of: '
            f"{usable}"
        )


def choose_plane(
    configured: str,
    hub: Side,
    receiver: Side,
    offered: Sequence[str],
    broken: Mapping[str, str] | None = None,
) -> str:
    """The plane for a receiver that offers `offered`.

    Args:
        configured: `weight_hub.plane`.
        hub: this end.
        receiver: the other end.
        offered: by the receiver.
        broken: why planes that are available do not work after all, by name.

    Raises:
        RejectedError: they have none in common; the reason says why for each.
    """
    reasons: list[str] = []
    for plane in PLANES.values():
        if plane.name not in offered or configured not in (AUTO, plane.name):
            continue
        reason = plane.available() or (broken or {}).get(plane.name) or plane.joins(hub, receiver)
        if reason is None:
            return plane.name
        reasons.append(f"{plane.name}: {reason}")
    what = "; ".join(reasons) or f"plane {configured} is set, {list(offered)} were offered"
    raise RejectedError(f"no way to push weights to this receiver ({what})", code="no_plane")
