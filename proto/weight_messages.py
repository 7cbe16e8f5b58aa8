"""The messages of the weights socket (hub: ROUTER)."""

from __future__ import annotations

from umbra.proto.message import Message
from umbra.proto.records import Manifest


class RegisterManifest(Message, frozen=True, kw_only=True):
    """The trainer states the layout of its weights."""

    manifest: Manifest


class ArenaReady(Message, frozen=True, kw_only=True):
    """The arena that the trainer writes into: `slots` slots of `manifest.total_bytes` in `path`."""

    path: str
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
    checksums: list[int]
    snapshot_s: float


class Subscribe(Message, frozen=True, kw_only=True):
    """A receiver wants every new version, by one of `planes` (in its order of preference)."""

    host: str
    planes: list[str]


class Subscribed(Message, frozen=True, kw_only=True):
    """How it will get them. The newest version follows as a push."""

    manifest: Manifest
    plane: str
    path: str  # the arena, for plane "shm"


class Prepare(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: stage `version` from `slot`, verify it, answer with Ready."""

    epoch: int
    version: int
    slot: int
    checksums: list[int]


class Ready(Message, frozen=True, kw_only=True):
    """`version` is staged and verified (or `error` says why not)."""

    epoch: int
    version: int
    wire_s: float
    stage_s: float
    error: str = ""


class Commit(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: load the staged version at the next token boundary."""

    epoch: int
    version: int


class Committed(Message, frozen=True, kw_only=True):
    """The engine serves `version` now; `commit_s` is the time for which generation waited."""

    epoch: int
    version: int
    commit_s: float
    error: str = ""


class Abort(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: forget what is staged for this epoch.

    With `dropped`, the hub pushes nothing more to it until it subscribes again.
    """

    epoch: int
    version: int
    reason: str
    dropped: bool = False


class HubStatusRequest(Message, frozen=True, kw_only=True):
    """What does the hub hold and push?"""


class HubStatus(Message, frozen=True, kw_only=True):
    """Newest published version (-1: none), and by receiver the version that it serves.

    `subscribed` tells the process that asked whether it is a receiver itself.
    """

    version: int
    pushes: int
    receivers: dict[str, int]
    subscribed: bool = False
