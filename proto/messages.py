"""Every message on the wire, by the socket it travels on. `README.md` here is the written spec.

A request names what it wants; its reply carries the request's id in `Header.reply_to`. Messages
that a server sends unasked (`Command`, `Prepare`, `Commit`, `Abort`) have `reply_to = None`.
"""

from __future__ import annotations

from typing import Any, Literal

from umbra.proto.records import Ledger, Manifest, Piece, Record, SampleTask, Trajectory

Role = Literal["buffer", "generator", "scorer", "trainer", "weight_hub", "monitor"]
State = Literal["starting", "joining", "ready", "draining", "stopped", "failed"]


class Header(Record, frozen=True, kw_only=True):
    """First frame of every message."""

    major: int
    minor: int
    type: str
    id: int  # counts up per sender and incarnation; a resend keeps its id
    sender: str
    incarnation: str  # changes at every start of a process: a new one supersedes the old
    reply_to: int | None = None
    sent_at: float = 0.0  # seconds since the epoch


class Message(Record, frozen=True, kw_only=True):
    """Base of all message bodies; the class-level tag is the header's `type`."""

    def raw_frames(self) -> int:
        """How many raw frames follow the body."""
        return 0


# -- any socket ---------------------------------------------------------------------------------


class Ok(Message, frozen=True, kw_only=True):
    """Done; nothing to add."""


class Nack(Message, frozen=True, kw_only=True):
    """Refused. `path` names the field at fault, `code` is for programs and `reason` for people."""

    code: str
    reason: str
    path: str = "$"


# -- control socket (buffer: ROUTER) ------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True):
    """A process asks to take part. `endpoints` are those it binds itself (the hub's `weights`)."""

    role: Role
    name: str
    pid: int
    host: str
    package_version: str
    endpoints: dict[str, str] = {}


class Welcome(Message, frozen=True, kw_only=True):
    """Joined. The rest of what the joiner must know; `weights` is empty until a hub has joined."""

    run_id: str
    heartbeat_s: float
    data: str
    events_in: str
    events_out: str
    weights: str = ""
    weights_incarnation: str = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """Alive, and how far. `progress` counts the main loop's work; `idle_s` since it last moved."""

    state: State
    activity: str
    progress: int
    idle_s: float
    stats: dict[str, float] = {}


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """What may have changed since Welcome. `version` is the number of optimizer steps committed."""

    version: int
    weights: str = ""
    weights_incarnation: str = ""  # another one says that the hub was restarted


class Leave(Message, frozen=True, kw_only=True):
    """An orderly goodbye; leases have been handed back before."""

    reason: str


class Command(Message, frozen=True, kw_only=True):
    """From the buffer, unasked: `drain` = hand back what you hold and leave."""

    kind: Literal["drain"]
    reason: str = ""


class Ping(Message, frozen=True, kw_only=True):
    """Are you there?"""


class Pong(Message, frozen=True, kw_only=True):
    """Here; `role` and `state` of the answering process."""

    role: Role
    state: State


class StatusRequest(Message, frozen=True, kw_only=True):
    """Tell the whole state of the run."""


class Member(Record, frozen=True, kw_only=True):
    """A process as the buffer sees it."""

    name: str
    role: Role
    incarnation: str
    pid: int
    host: str
    state: State
    activity: str
    progress: int
    idle_s: float
    silent_s: float  # since its last message
    stats: dict[str, float] = {}


class Stuck(Record, frozen=True, kw_only=True):
    """Something overdue: what, who holds it, for how long, and what was done about it."""

    what: str
    holder: str
    age_s: float
    action: str


class Status(Message, frozen=True, kw_only=True):
    """The whole state of the run."""

    run_id: str
    state: State
    uptime_s: float
    version: int
    steps: int  # the run's goal
    ledger: Ledger
    members: list[Member]
    departed: dict[str, str]  # name -> why it is gone
    staleness: dict[str, float]  # of the samples trained so far: mean, max, bound
    counters: dict[str, int]  # rejected messages by reason, expired leases, duplicates, ...
    stuck: list[Stuck]
    weights: str = ""  # endpoint of the hub


# -- data socket (buffer: ROUTER) ---------------------------------------------------------------


class LeaseSamples(Message, frozen=True, kw_only=True):
    """A generator asks for up to `capacity` samples; the answer may wait `wait_s` for work."""

    capacity: int
    version: int  # of the weights it serves now
    wait_s: float


class SampleLeases(Message, frozen=True, kw_only=True):
    """Samples to generate; empty when there was no work within `wait_s`."""

    tasks: list[SampleTask]


class SubmitTrajectories(Message, frozen=True, kw_only=True):
    """Complete trajectories. Acknowledged means stored."""

    trajectories: list[Trajectory]


class SubmitAck(Message, frozen=True, kw_only=True):
    """How many were accepted; `refused` maps sample ids to why (a lease that was lost, say)."""

    accepted: int
    refused: dict[str, str] = {}


class ReturnedSample(Record, frozen=True, kw_only=True):
    """A sample handed back unfinished, with what there is of it; or `failed`, with the reason."""

    sample_id: str
    attempt: int
    reason: str
    failed: bool = False
    partial: Trajectory | None = None


class ReturnSamples(Message, frozen=True, kw_only=True):
    """Samples handed back: an interruption, a drain, or a failure of the environment."""

    samples: list[ReturnedSample]


class RenewLeases(Message, frozen=True, kw_only=True):
    """Still working on these `(sample_id, attempt)`."""

    leases: list[tuple[str, int]]


class RenewAck(Message, frozen=True, kw_only=True):
    """Samples whose lease is not ours any more: stop working on them."""

    lost: list[str]


class LeaseBatch(Message, frozen=True, kw_only=True):
    """The trainer asks for the batch of optimizer step `step` (1-based), waiting up to `wait_s`."""

    step: int
    wait_s: float


class BatchLease(Message, frozen=True, kw_only=True):
    """The batch, whole groups in order; empty when it could not be filled within `wait_s`.

    `waiting_for` says in words what is missing.
    """

    step: int
    trajectories: list[Trajectory]
    waiting_for: str = ""


class CommitBatch(Message, frozen=True, kw_only=True):
    """The batch of `step` has been trained on. A repeated commit is a no-op."""

    step: int
    metrics: dict[str, float] = {}


class CommitAck(Message, frozen=True, kw_only=True):
    """Committed; the ledger after it."""

    version: int
    ledger: Ledger


class FinishRun(Message, frozen=True, kw_only=True):
    """The trainer is done: what is in flight ends as `cancelled`, everyone drains."""

    reason: str


class RunFinished(Message, frozen=True, kw_only=True):
    """The final ledger; nothing is in flight any more."""

    ledger: Ledger


# -- weights socket (hub: ROUTER) ---------------------------------------------------------------


class RegisterManifest(Message, frozen=True, kw_only=True):
    """The trainer states the layout of its weights.

    To a restarted hub it also says where it wrote so far, and what it published last, so that the
    hub can take over the arena that the one before has left.
    """

    manifest: Manifest
    path: str = ""  # of the arena that it has attached to
    published: Publish | None = None


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
    """A receiver wants every new version, by one of `planes` (in its order of preference).

    A relay also says where it serves the receivers of its host, and where it hands buckets on.
    """

    host: str
    planes: list[str]
    serves: str = ""  # endpoint of its weights socket
    buckets: str = ""  # endpoint of its buckets socket
    avoid: str = ""  # endpoint of a relay that did not answer
    streamed: bool = False  # it stages nothing: its slot must stay until Committed


class Subscribed(Message, frozen=True, kw_only=True):
    """How it will get them. The newest version follows as a push.

    With plane "relay", nothing follows: a relay on the receiver's host serves it, at `path`.
    """

    manifest: Manifest
    plane: str
    path: str  # the arena, for plane "shm"; the relay's weights endpoint, for plane "relay"


class Prepare(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: stage `version`, verify it, answer with Ready.

    It lies in `slot` of the arena, or is fetched bucket by bucket from `source`.
    """

    epoch: int
    version: int
    slot: int
    checksums: list[int]
    source: str = ""  # a buckets endpoint, for plane "tcp"


class Ready(Message, frozen=True, kw_only=True):
    """`version` is staged and verified (or `error` says why not).

    `source_lost`: because whoever it fetches from is gone.
    """

    epoch: int
    version: int
    wire_s: float
    stage_s: float
    error: str = ""
    wire_bytes: int = 0  # that travelled, after encoding
    source_lost: bool = False


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
    """To a receiver, unasked: forget what is staged; if `dropped`, subscribe again for more."""

    epoch: int
    version: int
    reason: str
    dropped: bool = False


class VersionsRequest(Message, frozen=True, kw_only=True):
    """Which versions does the hub hold?"""


class HeldVersion(Record, frozen=True, kw_only=True):
    """A version that the hub holds, in the arena or in a file of its own."""

    version: int
    place: str  # "slot 1", or the file's path
    pinned: bool = False
    newest: bool = False  # what receivers are brought to


class Versions(Message, frozen=True, kw_only=True):
    """The versions that the hub holds, oldest first; those that are not pinned may go any time."""

    held: list[HeldVersion]
    slots: int  # of the arena
    slot_bytes: int


class PinVersion(Message, frozen=True, kw_only=True):
    """Keep `version` until it is unpinned."""

    version: int


class UnpinVersion(Message, frozen=True, kw_only=True):
    """`version` need not be kept any longer."""

    version: int


class RollBack(Message, frozen=True, kw_only=True):
    """Push `version` to all receivers now; the trainer's next version follows it as usual."""

    version: int


class ExportVersion(Message, frozen=True, kw_only=True):
    """Write `version` as a Hugging Face directory at `path`, on the hub's host."""

    version: int
    path: str


class HubStatusRequest(Message, frozen=True, kw_only=True):
    """What does the hub hold and push?"""


class HubStatus(Message, frozen=True, kw_only=True):
    """What the hub holds, and by receiver the version that it serves."""

    version: int  # newest published, -1: none
    pushes: int
    receivers: dict[str, int]
    subscribed: bool = False  # is the process that asked a receiver itself?


# -- buckets socket (hub and relays: ROUTER) -----------------------------------------------------


class FetchBuckets(Message, frozen=True, kw_only=True):
    """A receiver asks for buckets, in this order; it takes the place of what it asked before.

    `contents` names what is wanted of each bucket, `bases` what the receiver already holds of them:
    one list per copy, 0 for nothing.
    """

    number: int  # counts up per receiver; pieces carry it
    wanted: list[int]
    contents: list[int]
    bases: list[list[int]] = []
    frame_bytes: int  # at most, in one message
    credit_bytes: int  # that may be under way unacknowledged


class Credit(Message, frozen=True, kw_only=True):
    """A receiver has used up `credit_bytes` of what it fetches; one way."""

    number: int
    credit_bytes: int


class Buckets(Message, frozen=True, kw_only=True):
    """To a receiver: pieces of what it fetches; one raw frame follows for each."""

    number: int
    pieces: list[Piece]

    def raw_frames(self) -> int:
        """One per piece."""
        return len(self.pieces)


# -- telemetry (PUB -> XSUB/XPUB -> SUB): may be lost, never changes behaviour -------------------


class Event(Message, frozen=True, kw_only=True):
    """Something happened; `Header.id` counts per sender, so that a gap shows a loss."""

    kind: str
    fields: dict[str, Any] = {}


CONTROL: tuple[type[Message], ...] = (
    Join, Welcome, Heartbeat, HeartbeatAck, Leave, Command, Ping, Pong, StatusRequest, Status,
)  # fmt: skip
DATA: tuple[type[Message], ...] = (
    LeaseSamples, SampleLeases, SubmitTrajectories, SubmitAck, ReturnSamples, RenewLeases, RenewAck,
    LeaseBatch, BatchLease, CommitBatch, CommitAck, FinishRun, RunFinished,
)  # fmt: skip
WEIGHTS: tuple[type[Message], ...] = (
    RegisterManifest, ArenaReady, AcquireSlot, SlotGranted, Publish, Subscribe, Subscribed,
    Prepare, Ready, Commit, Committed, Abort, HubStatusRequest, HubStatus,
    VersionsRequest, Versions, PinVersion, UnpinVersion, RollBack, ExportVersion,
)  # fmt: skip
BUCKETS: tuple[type[Message], ...] = (FetchBuckets, Credit, Buckets)
TELEMETRY: tuple[type[Message], ...] = (Event,)
ANY: tuple[type[Message], ...] = (Ok, Nack)

TYPES: dict[str, type[Message]] = {
    cls.__name__: cls for cls in (*ANY, *CONTROL, *DATA, *WEIGHTS, *BUCKETS, *TELEMETRY)
}
