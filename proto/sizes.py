"""The largest frame of each message, known from the type in its header and its sender's role.

A server refuses what is larger before it decodes anything; ZeroMQ ends the connection of a peer
that sends a frame larger than all messages to that socket may be.
"""

from __future__ import annotations

from umbra.proto.access import SENDERS, SOCKETS, KeyRole, may_send
from umbra.proto.messages import (
    BatchLease,
    Buckets,
    CommitBatch,
    Event,
    FetchBuckets,
    FlushPartials,
    HoldArena,
    HubStatus,
    Interrupt,
    InterruptRequest,
    Message,
    OfferSlot,
    Prepare,
    Publish,
    RegisterManifest,
    RenewAck,
    RenewLeases,
    ReturnSamples,
    RunFinished,
    SampleLeases,
    ScoringLeases,
    Status,
    SubmitAck,
    SubmitScores,
    SubmitTrajectories,
    Subscribed,
)

HEADER_BYTES = 4 << 10
COMMON_BYTES = 64 << 10
SUBMIT_BYTES = 32 << 20  # one trajectory of the most tokens fits, and thousands of usual ones
SUBSCRIPTION_BYTES = 1 << 10  # what a handshake needs; a topic is far shorter
RAW_BYTES = 64 << 20  # a raw frame
LEASE_BYTES = 256 << 20  # what a client is given to work on
MOST_BYTES = 1 << 30  # any frame: a batch, whose tokens may have hundreds of bytes of routing each

# Messages that may be larger than `COMMON_BYTES`.
LARGE: dict[type[Message], int] = {
    Status: 64 << 20,
    SampleLeases: LEASE_BYTES,
    SubmitTrajectories: SUBMIT_BYTES,
    SubmitAck: LEASE_BYTES,
    ReturnSamples: SUBMIT_BYTES,
    RenewLeases: 1 << 20,
    RenewAck: 1 << 20,
    Interrupt: 1 << 20,
    InterruptRequest: 1 << 20,
    FlushPartials: SUBMIT_BYTES,
    ScoringLeases: LEASE_BYTES,
    SubmitScores: SUBMIT_BYTES,
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
    Buckets: 1 << 20,
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
