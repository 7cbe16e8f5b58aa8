"""Permissions and size limits of messages: the tables that a server consults first.

Where a run has keys, its servers refuse all that the key of a connection does not allow. Without
keys they go by the role that a member has joined under. A server refuses a message above its limit
before it decodes anything; ZeroMQ ends the connection of a peer that sends a frame larger than all
messages to that socket may be.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

from umbra.proto import messages as m

# An operator is no process of the run, but a person who may change it from outside.
KeyRole = m.Role | Literal["operator"]
KEY_ROLES: tuple[KeyRole, ...] = (*get_args(m.Role), "operator")

MEMBERS: tuple[KeyRole, ...] = (
    "generator", "scorer", "trainer", "weight_hub", "part", "relay", "monitor",
)  # fmt: skip
ANYONE: tuple[KeyRole, ...] = (*MEMBERS, "operator")
RECEIVERS: tuple[KeyRole, ...] = ("generator", "scorer", "relay")

SENDERS: dict[type[m.Message], tuple[KeyRole, ...]] = {
    m.Ok: ANYONE,
    m.Nack: ANYONE,
    m.Join: MEMBERS,
    m.Heartbeat: MEMBERS,
    m.Leave: MEMBERS,
    m.Ping: ANYONE,
    m.StatusRequest: ANYONE,
    m.Operate: ("operator",),
    m.LeaseTasks: ("generator", "scorer"),
    m.SubmitResults: ("generator", "scorer"),
    m.RenewLeases: ("generator", "scorer"),
    m.ReturnTasks: ("generator",),
    m.LeaseBatch: ("trainer",),
    m.CommitBatch: ("trainer",),
    m.CheckpointSaved: ("trainer",),
    m.FinishRun: ("trainer",),
    m.RegisterManifest: ("trainer",),
    m.AcquireSlot: ("trainer",),
    m.Publish: ("trainer",),
    m.PartState: ("part",),
    m.Subscribe: RECEIVERS,
    m.Ready: RECEIVERS,
    m.Committed: RECEIVERS,
    m.HubStatusRequest: ANYONE,
    m.Event: MEMBERS,
}

# Read-only requests: they change nothing, so they may be answered twice.
QUESTIONS: tuple[type[m.Message], ...] = (m.Ping, m.StatusRequest, m.HubStatusRequest)

SOCKETS: dict[str, tuple[type[m.Message], ...]] = {
    "control": (*m.CONTROL, *m.TELEMETRY),
    "data": m.DATA,
    "weights": (*m.WEIGHTS, m.Ping),
}
WATCHERS: tuple[KeyRole, ...] = ("monitor", "operator")  # may connect to `events`


@cache
def may_send(role: KeyRole, kind: type[m.Message]) -> bool:
    return role in SENDERS.get(kind, ())


@cache
def needs_membership(kind: type[m.Message]) -> bool:
    """Return whether the buffer answers it only to members; an operator is none."""
    return kind is not m.Join and "operator" not in SENDERS.get(kind, ())


def may_connect(role: KeyRole, socket: str) -> bool:
    """Return whether the key of `role` opens `socket`: it may send some message there."""
    if socket == "events":
        return role in WATCHERS
    return any(may_send(role, kind) for kind in SOCKETS.get(socket, ()))


HEADER_BYTES = 4 << 10
COMMON_BYTES = 64 << 10
SUBMIT_BYTES = 32 << 20  # one trajectory of the most tokens fits, and thousands of usual ones
SUBSCRIPTION_BYTES = 1 << 10  # what a handshake needs; a topic is far shorter
LEASE_BYTES = 256 << 20  # what a client is given to work on
MOST_BYTES = 1 << 30  # any frame: a batch, whose tokens may have hundreds of bytes of routing each

# Messages that may be larger than `COMMON_BYTES`.
LARGE: dict[type[m.Message], int] = {
    m.Status: 64 << 20,
    m.TaskLeases: LEASE_BYTES,
    m.SubmitResults: SUBMIT_BYTES,
    m.RenewLeases: SUBMIT_BYTES,
    m.ReturnTasks: SUBMIT_BYTES,
    m.Interrupt: 1 << 20,
    m.BatchLease: MOST_BYTES,
    m.CommitBatch: 256 << 10,
    m.RunFinished: 16 << 20,
    m.RegisterManifest: 16 << 20,
    m.Publish: 1 << 20,
    m.HoldArena: 16 << 20,
    m.OfferSlot: 1 << 20,
    m.Subscribed: 16 << 20,
    m.Prepare: 1 << 20,
    m.Event: 256 << 10,
}


def body_bytes(kind: type[m.Message]) -> int:
    return LARGE.get(kind, COMMON_BYTES)


def allowed_bytes(kind: type[m.Message], role: KeyRole | None) -> int:
    """Return the same for a peer with a key of `role`: 0 for what it may not send.

    Without keys (`role` None) it is what some role may send.
    """
    allowed = kind in SENDERS if role is None else may_send(role, kind)
    return body_bytes(kind) if allowed else 0


def socket_bytes(socket: str) -> int:
    """Return bytes of the largest frame that anybody may send to a server's `socket`."""
    if socket == "events":
        return SUBSCRIPTION_BYTES
    kinds = SOCKETS.get(socket, ())
    return max((body_bytes(kind) for kind in kinds if kind in SENDERS), default=COMMON_BYTES)
