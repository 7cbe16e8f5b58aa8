"""Every message on the wire, by the socket it travels on. `README.md` here is the written spec.

A request names what it wants; its reply carries the request's id in `Header.reply_to`. Messages
that a server sends unasked (`Command`, `Interrupt`, `Prepare`, `Commit`, `Abort`) have
`reply_to = None`. Those of the weights socket are in `weights.py`, those of the trainer and the
buffer in `training.py`, those by which a person operates a run in `operator.py`.
"""

from __future__ import annotations

from typing import Any, Literal

from umbra.proto.base import Header as Header
from umbra.proto.base import Message, Role, State
from umbra.proto.operator import (
    CheckpointMade,
    CheckpointRequest,
    DrainRequest,
    EvalBegun,
    EvalRequest,
    Interrupted,
    InterruptRequest,
    PauseRequest,
    ResumeRequest,
)
from umbra.proto.records import (
    EvalReport,
    Ledger,
    Record,
    SampleTask,
    Score,
    ScoringTask,
    Trajectory,
)
from umbra.proto.training import (
    BatchLease,
    CheckpointSaved,
    CommitAck,
    CommitBatch,
    FinishRun,
    LeaseBatch,
    PeekBatch,
    RejectSamples,
    RunFinished,
)
from umbra.proto.weights import (
    Abort,
    AcquireSlot,
    ArenaReady,
    Buckets,
    Commit,
    Committed,
    Credit,
    ExportVersion,
    FetchBuckets,
    HubStatus,
    HubStatusRequest,
    PinVersion,
    Prepare,
    Publish,
    Ready,
    RegisterManifest,
    RollBack,
    SlotGranted,
    Subscribe,
    Subscribed,
    UnpinVersion,
    Versions,
    VersionsRequest,
)

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
    shares: dict[str, float] = {}  # of its recent time, by activity
    clock_offset_s: float = 0.0  # add it to a time of the sender to get the buffer's
    clock_error_s: float = -1.0  # of the offset, at most; negative = not measured yet


class HeartbeatAck(Message, frozen=True, kw_only=True):
    """What may have changed since Welcome. `version` is the number of optimizer steps committed."""

    version: int
    heartbeat_s: float = 0.0  # seconds between heartbeats from now on; 0 = as before
    weights: str = ""
    weights_incarnation: str = ""  # another one says that the hub was restarted
    received_at: float = 0.0  # when the heartbeat came in, by the buffer's clock


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
    shares: dict[str, float] = {}
    clock_offset_s: float = 0.0
    clock_error_s: float = -1.0
    progress_per_s: float = 0.0  # units of work as of late


class Stuck(Record, frozen=True, kw_only=True):
    """Something overdue: what, who holds it, for how long, and what was done about it."""

    what: str
    holder: str
    age_s: float
    action: str


class Curves(Record, frozen=True, kw_only=True):
    """Figures of the steps so far, as means over stretches of them, so that they stay few."""

    steps: list[int] = []  # the last one of each stretch
    values: dict[str, list[float | None]] = {}  # by name


class RunWarning(Record, frozen=True, kw_only=True):
    """Nothing is learned, or something is lost: which of the known names, and a sentence on it."""

    name: str
    text: str
    figures: dict[str, float]
    since: int  # version at which it was first raised
    until: int = -1  # version at which it was over; -1 while it holds


class Rates(Record, frozen=True, kw_only=True):
    """What goes on per second, as of late."""

    steps_per_s: float = 0.0  # committed
    samples_per_s: float = 0.0  # trained: in committed batches
    answers_per_s: float = 0.0  # complete answers that were accepted
    issued_per_s: float = 0.0  # samples
    ended_per_s: float = 0.0  # samples that are over without being trained on


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
    evals: list[EvalReport] = []  # oldest first
    eval_ledger: Ledger = Ledger()  # of eval samples, which the other one leaves out
    staleness_counts: list[int] = []  # trained samples by staleness, from 0
    curves: Curves = Curves()
    events: str = ""  # endpoint for those who watch telemetry
    paused: str = ""  # why nothing is handed out, if so
    ending: str = ""  # why the run ends, once it does
    finished: bool = False  # it ends because all steps are done
    refused: dict[str, int] = {}  # who was refused what for lack of the right key, in words
    rates: Rates = Rates()
    health: dict[str, float] = {}  # shares of groups, answers and samples that teach nothing
    warnings: list[RunWarning] = []  # those that hold, and those that are over


# -- data socket (buffer: ROUTER) ---------------------------------------------------------------


class LeaseSamples(Message, frozen=True, kw_only=True):
    """A generator asks for up to `capacity` samples; the answer may wait `wait_s` for work."""

    capacity: int
    version: int  # of the weights it serves now
    wait_s: float


class SampleLeases(Message, frozen=True, kw_only=True):
    """Samples to generate; empty when there was no work within `wait_s`."""

    tasks: list[SampleTask]
    more_pinned: bool = False  # keep to your version: more samples pinned to it wait for you


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


class Interrupt(Message, frozen=True, kw_only=True):
    """To a generator, unasked: stop these `(sample_id, attempt)` and hand back what there is."""

    leases: list[tuple[str, int]]
    reason: str = ""


class FlushPartials(Message, frozen=True, kw_only=True):
    """What there is so far of samples that are still being generated; their leases go on."""

    partials: list[Trajectory]


class LeaseScoring(Message, frozen=True, kw_only=True):
    """A scorer asks for up to `capacity` trajectories of `stage`; the answer may wait `wait_s`."""

    stage: str
    capacity: int
    wait_s: float


class ScoringLeases(Message, frozen=True, kw_only=True):
    """Trajectories to score; empty when there were none within `wait_s`."""

    tasks: list[ScoringTask]


class SubmitScores(Message, frozen=True, kw_only=True):
    """What `stage` found for trajectories that the scorer has leases on."""

    stage: str
    scores: list[Score]


# -- telemetry (PUB -> XSUB/XPUB -> SUB): may be lost, never changes behaviour -------------------


class Event(Message, frozen=True, kw_only=True):
    """Something happened; `Header.id` counts per sender, so that a gap shows a loss."""

    kind: str
    fields: dict[str, Any] = {}


CONTROL: tuple[type[Message], ...] = (
    Join, Welcome, Heartbeat, HeartbeatAck, Leave, Command, Ping, Pong, StatusRequest, Status,
    DrainRequest, PauseRequest, ResumeRequest, EvalRequest, EvalBegun,
    CheckpointRequest, CheckpointMade, InterruptRequest, Interrupted,
)  # fmt: skip
DATA: tuple[type[Message], ...] = (
    LeaseSamples, SampleLeases, SubmitTrajectories, SubmitAck, ReturnSamples, RenewLeases, RenewAck,
    Interrupt, FlushPartials, LeaseScoring, ScoringLeases, SubmitScores,
    LeaseBatch, PeekBatch, BatchLease, RejectSamples, CommitBatch, CommitAck, CheckpointSaved,
    FinishRun, RunFinished,
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
