"""Who may send what: one table from messages to the keys whose holders may send them.

Where a run has keys, its servers refuse everything else. Without keys they go by the role that a
member has joined under.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

from umbra.proto.base import Message, Role
from umbra.proto.messages import (
    BUCKETS,
    CONTROL,
    DATA,
    TELEMETRY,
    WEIGHTS,
    AcquireSlot,
    CheckpointRequest,
    CheckpointSaved,
    CommitBatch,
    Committed,
    Credit,
    DrainRequest,
    EvalRequest,
    Event,
    FetchBuckets,
    FinishRun,
    FlushPartials,
    Heartbeat,
    HubStatusRequest,
    InterruptRequest,
    Join,
    LeaseBatch,
    LeaseSamples,
    LeaseScoring,
    Leave,
    Nack,
    Ok,
    PartState,
    PauseRequest,
    Ping,
    Publish,
    Ready,
    RegisterManifest,
    RenewLeases,
    ResumeRequest,
    ReturnSamples,
    StatusRequest,
    SubmitScores,
    SubmitTrajectories,
    Subscribe,
)

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
    LeaseSamples: ("generator",),
    SubmitTrajectories: ("generator",),
    ReturnSamples: ("generator",),
    RenewLeases: ("generator", "scorer"),
    FlushPartials: ("generator",),
    LeaseScoring: ("scorer",),
    SubmitScores: ("scorer",),
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
    Credit: RECEIVERS,
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
