"""The messages of the hub's weights socket."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from umbra.proto.bounds import (
    BUCKETS,
    OWNERS,
    Blob,
    Name,
    Number,
    Size,
    Text,
)
from umbra.proto.records import BucketsAt, GpuFacts, Manifest, Message, NcclRound

# -- weights socket (hub: ROUTER) ---------------------------------------------------------------


class RegisterManifest(Message, frozen=True, kw_only=True):
    """The trainer states the layout of its weights.

    To a restarted hub it also says where it wrote so far, and what it published last, so that the
    hub can take over the arena that the one before has left.
    """

    manifest: Manifest
    path: Text = ""  # of the arena that it has attached to
    published: Publish | None = None


class ArenaReady(Message, frozen=True, kw_only=True):
    """The arena that the trainer writes into: `slots` slots of `manifest.total_bytes` in `path`."""

    path: Text
    slots: int


class AcquireSlot(Message, frozen=True, kw_only=True):
    """The trainer asks for a slot to write `version` into; answered when one is free."""

    version: int


class SlotGranted(Message, frozen=True, kw_only=True):
    """Write here; nobody reads it until Publish."""

    slot: int


class Publish(Message, frozen=True, kw_only=True):
    """`version` lies in `slot`, with a checksum per bucket (xxh3-64). Push it."""

    version: int
    slot: int
    checksums: Annotated[list[int], Meta(max_length=BUCKETS)]
    snapshot_s: Number


class PartState(Message, frozen=True, kw_only=True):
    """A part hub states, again and again, that it is there and which arena it holds.

    It hands out the buckets that the ranks of trainer host `owner` write. `path` is the arena that
    it was told to hold last, and `error` why it does not.
    """

    owner: Size
    host: Name  # names the /dev/shm that it sees
    buckets: BucketsAt
    path: Text = ""
    error: Text = ""


class HoldArena(Message, frozen=True, kw_only=True):
    """To a part hub, unasked: hold the arena at `path`, with memory for its own buckets alone.

    With `fresh` it is to be made, else it is one that this host has had since it was made. An empty
    `path` means none: there is nothing to be held any more.
    """

    manifest: Manifest
    path: Text
    slots: int
    fresh: bool


class OfferSlot(Message, frozen=True, kw_only=True):
    """To a part hub, unasked: hand out its buckets in `slot` of the arena at `path`.

    Without `checksums` the slot will be overwritten: nothing of it is handed out.
    """

    path: Text
    slot: int
    checksums: Annotated[list[int], Meta(max_length=BUCKETS)]
    deltas: bool = False  # to the version before as well


class Subscribe(Message, frozen=True, kw_only=True):
    """A receiver wants every new version, by one of `planes` (in its order of preference).

    A relay also says where it serves the receivers of its host, and where it hands buckets on.
    """

    host: Name
    planes: Annotated[list[Name], Meta(max_length=16)]
    serves: Name = ""  # endpoint of its weights socket
    buckets: BucketsAt | None = None
    avoid: Name = ""  # endpoint of a relay that did not answer
    gpu: GpuFacts | None = None  # for planes "nccl" and "cuda_ipc"


class Subscribed(Message, frozen=True, kw_only=True):
    """The plane of a subscription. The newest version follows as a push.

    With plane "relay", nothing follows: a relay on the receiver's host serves it, at `path`.
    """

    manifest: Manifest
    plane: Name
    path: Text  # the arena, for plane "shm"; the relay's weights endpoint, for plane "relay"


class Prepare(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: stage `version`, verify it, answer with Ready.

    It lies in `slot` of the arena, in `slot` of the hub's device memory that `memory` is a handle
    of, is broadcast in `round`, or is fetched bucket by bucket from `sources`: from the only one,
    or the buckets of each owner from its own.
    """

    epoch: int
    version: int
    slot: int
    checksums: Annotated[list[int], Meta(max_length=BUCKETS)]
    round: NcclRound | None = None  # for plane "nccl", unless it is to be fetched
    memory: Blob | None = None  # a CUDA IPC handle, for plane "cuda_ipc"
    sources: Annotated[list[BucketsAt], Meta(max_length=OWNERS)] = []  # by owner


class Ready(Message, frozen=True, kw_only=True):
    """`version` is staged and verified (or `error` says why not).

    `source_lost`: because whoever it fetches from is gone. `in_place`: its engine loads from the
    hub's slot.
    """

    epoch: int
    version: int
    wire_s: Number
    stage_s: Number
    error: Text = ""
    wire_bytes: int = 0  # that travelled, after encoding
    source_lost: bool = False
    in_place: bool = False


class Commit(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: load the staged version at the next token boundary."""

    epoch: int
    version: int


class Committed(Message, frozen=True, kw_only=True):
    """The engine serves `version` now; `commit_s` is the time for which generation waited."""

    epoch: int
    version: int
    commit_s: Number
    error: Text = ""


class Abort(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: discard the version staged for this epoch.

    With `dropped`, the hub pushes nothing more to it until it subscribes again.
    """

    epoch: int
    version: int
    reason: Text
    dropped: bool = False


class HubStatusRequest(Message, frozen=True, kw_only=True):
    """Does the hub know the process that asks?"""


class HubStatus(Message, frozen=True, kw_only=True):
    """The hub's knowledge of the process that asked: a receiver, or the trainer of its layout."""

    subscribed: bool
