"""The ways in which weights can travel from the hub to a receiver, and which one a pair uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from umbra.proto.errors import RejectedError, UsageError
from umbra.services.weight_hub.nccl_plane import cuda_unavailable, nccl_unavailable

AUTO = "auto"
UNUSED = "CUDA is there, but the hub does not push over this plane yet"


@dataclass(frozen=True, slots=True)
class Plane:
    """A way for weights to travel.

    Args:
        name: as in the configuration and on the wire.
        available: why this hub cannot use it; None if it can.
        joins: why it cannot connect two hosts (the hub's and a receiver's); None if it can.
    """

    name: str
    available: Callable[[], str | None]
    joins: Callable[[str, str], str | None]


def _available() -> None:
    return None


def _anywhere(_hub: str, _receiver: str) -> None:
    return None


def _same_host(hub: str, receiver: str) -> str | None:
    return None if hub == receiver else "the hub's /dev/shm is not the receiver's"


# In the hub's order of preference. The agents of `nccl` and `cuda_ipc` exist and can be tried
# (tests/gpu), but no hub drives them yet: who asks for them gets a sentence.
PLANES: dict[str, Plane] = {
    plane.name: plane
    for plane in (
        Plane("cuda_ipc", lambda: cuda_unavailable() or UNUSED, _same_host),
        Plane("shm", _available, _same_host),
        Plane("nccl", lambda: nccl_unavailable() or UNUSED, _anywhere),
        Plane("tcp", _available, _anywhere),
    )
}


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


def choose_plane(configured: str, hub_host: str, host: str, offered: Sequence[str]) -> str:
    """The plane for a receiver on `host` that offers `offered`.

    Raises:
        RejectedError: they have none in common; the reason says why for each.
    """
    reasons: list[str] = []
    for plane in PLANES.values():
        if plane.name not in offered or configured not in (AUTO, plane.name):
            continue
        reason = plane.available() or plane.joins(hub_host, host)
        if reason is None:
            return plane.name
        reasons.append(f"{plane.name}: {reason}")
    what = "; ".join(reasons) or f"plane {configured} is set, {list(offered)} were offered"
    raise RejectedError(f"no way to push weights to this receiver ({what})", code="no_plane")
