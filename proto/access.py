"""Who may send which message, and how large it may be: the tables that a server looks at first.

Where a run has keys, its servers refuse all that the key of a connection does not allow. Without
keys they go by the role that a member has joined under. A server refuses what is too large before
it decodes anything; ZeroMQ ends the connection of a peer that sends a frame larger than all
messages to that socket may be.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

from umbra.proto.messages import (
    BUCKETS,
    CONTROL,
    DATA,
    TELEMETRY,
    WEIGHTS,
    AcquireSlot,
    BatchLease,
    CheckpointRequest,
    CheckpointSaved,
    CommitBatch,
    Committed,
    DrainRequest,
    EvalRequest,
    Event,
    FetchBuckets,
    FinishRun,
    Heartbeat,
    HoldArena,
    HubStatus,
    HubStatusRequest,
    Interrupt,
    InterruptRequest,
    Join,
    LeaseBatch,
    LeaseTasks,
    Leave,
    Nack,
    OfferSlot,
    Ok,
    PartState,
    PauseRequest,
    Ping,
    Prepare,
    Publish,
    Ready,
    RegisterManifest,
    RenewLeases,
    ResumeRequest,
    ReturnTasks,
    RunFinished,
    Status,
    StatusRequest,
    SubmitResults,
    Subscribe,
    Subscribed,
    TaskLeases,
)
from umbra.proto.records import Message, Role

# An operator is no process of the run, but a person who may change it from outside.
KeyRole = Role | Literal["operator"]
KEY_ROLES: tuple[KeyRole, ...] = (*get_args(Role), "operator")

MEMBERS: tuple[KeyRole, ...] = (
    "generator", "scorer", "trainer", "weight_hub", "part", "relay", "monitor",
)  # fmt: skip
ANYONE: tuple[KeyRole, ...] = (*MEMBERS, "operator")
RECEIVERS: tuple[KeyRole, ...] = ("generator", "scorer", "relay")

SENDERS: dict[type[Message], tuple[KeyRole, ...]] = {
    Ok: ANYONE,
    Nack: ANYONE,
    Join: MEMBERS,
    Heartbeat: MEMBERS,
    Leave: MEMBERS,
    Ping: ANYONE,
    StatusRequest: ANYONE,
    DrainRequest: ("operator",),
    PauseRequest: ("operator",),
    ResumeRequest: ("operator",),
    EvalRequest: ("operator",),
    CheckpointRequest: ("operator",),
    InterruptRequest: ("operator",),
    LeaseTasks: ("generator", "scorer"),
    SubmitResults: ("generator", "scorer"),
    RenewLeases: ("generator", "scorer"),
    ReturnTasks: ("generator",),
    LeaseBatch: ("trainer",),
    CommitBatch: ("trainer",),
    CheckpointSaved: ("trainer",),
    FinishRun: ("trainer",),
    RegisterManifest: ("trainer",),
    AcquireSlot: ("trainer",),
    Publish: ("trainer",),
    PartState: ("part",),
    Subscribe: RECEIVERS,
    Ready: RECEIVERS,
    Committed: RECEIVERS,
    HubStatusRequest: ANYONE,
    FetchBuckets: RECEIVERS,
    Event: MEMBERS,
}

# What is answered from what there is and changes nothing: it may be answered twice.
QUESTIONS: tuple[type[Message], ...] = (Ping, StatusRequest, HubStatusRequest)

SOCKETS: dict[str, tuple[type[Message], ...]] = {
    "control": CONTROL,
    "data": DATA,
    "weights": (*WEIGHTS, Ping),
    "buckets": BUCKETS,
    "events_in": TELEMETRY,
}
WATCHERS: tuple[KeyRole, ...] = ("monitor", "operator")  # may connect to `events_out`


@cache
def may_send(role: KeyRole, kind: type[Message]) -> bool:
    """Whether the key of `role` allows to send a message of this kind."""
    return role in SENDERS.get(kind, ())


@cache
def needs_membership(kind: type[Message]) -> bool:
    """Whether the buffer answers it to members alone; an operator is none."""
    return kind is not Join and "operator" not in SENDERS.get(kind, ())


def may_connect(role: KeyRole, socket: str) -> bool:
    """Whether the key of `role` opens `socket`: there is something that it may send there."""
    if socket == "events_out":
        return role in WATCHERS
    return any(may_send(role, kind) for kind in SOCKETS.get(socket, ()))


HEADER_BYTES = 4 << 10
COMMON_BYTES = 64 << 10
SUBMIT_BYTES = 32 << 20  # one trajectory of the most tokens fits, and thousands of usual ones
SUBSCRIPTION_BYTES = 1 << 10  # what a handshake needs; a topic is far shorter
LEASE_BYTES = 256 << 20  # what a client is given to work on
MOST_BYTES = 1 << 30  # any frame: a batch, whose tokens may have hundreds of bytes of routing each

# Messages that may be larger than `COMMON_BYTES`.
LARGE: dict[type[Message], int] = {
    Status: 64 << 20,
    TaskLeases: LEASE_BYTES,
    SubmitResults: SUBMIT_BYTES,
    RenewLeases: SUBMIT_BYTES,
    ReturnTasks: SUBMIT_BYTES,
    Interrupt: 1 << 20,
    InterruptRequest: 1 << 20,
    BatchLease: MOST_BYTES,
    CommitBatch: 256 << 10,
    RunFinished: 16 << 20,
    RegisterManifest: 16 << 20,
    Publish: 1 << 20,
    HoldArena: 16 << 20,
    OfferSlot: 1 << 20,
    Subscribed: 16 << 20,
    Prepare: 1 << 20,
    HubStatus: 4 << 20,
    FetchBuckets: 4 << 20,
    Event: 256 << 10,
}


def body_bytes(kind: type[Message]) -> int:
    """Bytes that the body of such a message may have at most."""
    return LARGE.get(kind, COMMON_BYTES)


def allowed_bytes(kind: type[Message], role: KeyRole | None) -> int:
    """The same for a server's peer whose key is of `role`: 0 for what that may not send.

    Without keys (`role` None) it is what some role may send.
    """
    allowed = kind in SENDERS if role is None else may_send(role, kind)
    return body_bytes(kind) if allowed else 0


def socket_bytes(socket: str) -> int:
    """Bytes of the largest frame that anybody may send to a server's `socket`."""
    if socket == "events_out":
        return SUBSCRIPTION_BYTES
    kinds = SOCKETS.get(socket, ())
    return max((body_bytes(kind) for kind in kinds if kind in SENDERS), default=COMMON_BYTES)
