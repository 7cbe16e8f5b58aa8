"""Sockets, senders and sizes of messages: the table that a server consults first.

Where a run has keys, its servers refuse all that the key of a connection does not allow. Without
keys they go by the role that a member has joined under. A server refuses a message above its limit
before it decodes anything; ZeroMQ ends the connection of a peer that sends a frame larger than all
messages to that socket may be.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple, get_args

from umbra.proto import messages as m

# An operator is no process of the run, but a person who may change it from outside.
KeyRole = m.Role | Literal["operator"]
KEY_ROLES: tuple[KeyRole, ...] = (*get_args(m.Role), "operator")

MEMBERS: tuple[KeyRole, ...] = (
    "generator", "scorer", "trainer", "weight_hub", "part", "relay", "monitor",
)  # fmt: skip
ANYONE: tuple[KeyRole, ...] = (*MEMBERS, "operator")
RECEIVERS: tuple[KeyRole, ...] = ("generator", "scorer", "relay")
WORKERS: tuple[KeyRole, ...] = ("generator", "scorer")
TRAINER: tuple[KeyRole, ...] = ("trainer",)

HEADER_BYTES = 4 << 10
COMMON_BYTES = 64 << 10
SUBMIT_BYTES = 32 << 20  # one trajectory of the most tokens fits, and thousands of usual ones
SUBSCRIPTION_BYTES = 1 << 10  # what a handshake needs; a topic is far shorter
LEASE_BYTES = 256 << 20  # what a client is given to work on
MOST_BYTES = 1 << 30  # any frame: a batch, whose tokens may have hundreds of bytes of routing each


class Rule(NamedTuple):
    socket: str  # that it travels on; "events" comes on control and is passed on
    senders: tuple[KeyRole, ...] = ()  # by their keys; servers send the others
    most_bytes: int = COMMON_BYTES


RULES: dict[type[m.Message], Rule] = {
    m.Ok: Rule("any", ANYONE),
    m.Nack: Rule("any", ANYONE),
    m.Join: Rule("control", MEMBERS),
    m.Welcome: Rule("control"),
    m.Heartbeat: Rule("control", MEMBERS),
    m.HeartbeatAck: Rule("control"),
    m.Leave: Rule("control", MEMBERS),
    m.Command: Rule("control"),
    m.Ping: Rule("control", ANYONE),
    m.Pong: Rule("control"),
    m.StatusRequest: Rule("control", ANYONE),
    m.Status: Rule("control", most_bytes=64 << 20),
    m.Drain: Rule("control", ("operator",)),
    m.LeaseTasks: Rule("data", WORKERS),
    m.SubmitResults: Rule("data", WORKERS, SUBMIT_BYTES),
    m.RenewLeases: Rule("data", WORKERS, SUBMIT_BYTES),
    m.TaskLeases: Rule("data", most_bytes=LEASE_BYTES),
    m.ReturnTasks: Rule("data", ("generator",), SUBMIT_BYTES),
    m.Interrupt: Rule("data", most_bytes=1 << 20),
    m.LeaseBatch: Rule("data", TRAINER),
    m.BatchLease: Rule("data", most_bytes=MOST_BYTES),
    m.CommitBatch: Rule("data", TRAINER, 256 << 10),
    m.CommitAck: Rule("data"),
    m.CheckpointSaved: Rule("data", TRAINER),
    m.FinishRun: Rule("data", TRAINER),
    m.RunFinished: Rule("data", most_bytes=16 << 20),
    m.RegisterManifest: Rule("weights", TRAINER, 16 << 20),
    m.ArenaReady: Rule("weights"),
    m.AcquireSlot: Rule("weights", TRAINER),
    m.SlotGranted: Rule("weights"),
    m.Publish: Rule("weights", TRAINER, 1 << 20),
    m.PartState: Rule("weights", ("part",)),
    m.HoldArena: Rule("weights", most_bytes=16 << 20),
    m.OfferSlot: Rule("weights", most_bytes=1 << 20),
    m.Subscribe: Rule("weights", RECEIVERS),
    m.Subscribed: Rule("weights", most_bytes=16 << 20),
    m.Prepare: Rule("weights", most_bytes=1 << 20),
    m.Ready: Rule("weights", RECEIVERS),
    m.Commit: Rule("weights"),
    m.Committed: Rule("weights", RECEIVERS),
    m.Abort: Rule("weights"),
    m.HubStatusRequest: Rule("weights", ANYONE),
    m.HubStatus: Rule("weights"),
    m.Event: Rule("events", MEMBERS, 256 << 10),
}
SENDERS = {kind: rule.senders for kind, rule in RULES.items() if rule.senders}

# Read-only requests: they change nothing, so they may be answered twice.
QUESTIONS: tuple[type[m.Message], ...] = (m.Ping, m.StatusRequest, m.HubStatusRequest)
WATCHERS: tuple[KeyRole, ...] = ("monitor", "operator")  # may connect to `events`


def _of_socket(socket: str) -> tuple[type[m.Message], ...]:
    return tuple(kind for kind, rule in RULES.items() if rule.socket == socket)


SOCKETS = {
    "control": (*_of_socket("control"), m.Event),
    "data": _of_socket("data"),
    "weights": (*_of_socket("weights"), m.Ping),
}


@cache
def may_send(role: KeyRole, kind: type[m.Message]) -> bool:
    return role in RULES[kind].senders


@cache
def needs_membership(kind: type[m.Message]) -> bool:
    """Return whether the buffer answers it only to members; an operator is none."""
    return kind is not m.Join and "operator" not in RULES[kind].senders


def may_connect(role: KeyRole, socket: str) -> bool:
    """Return whether the key of `role` opens `socket`: it may send some message there."""
    if socket == "events":
        return role in WATCHERS
    return any(may_send(role, kind) for kind in SOCKETS.get(socket, ()))


def body_bytes(kind: type[m.Message]) -> int:
    return RULES[kind].most_bytes


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
