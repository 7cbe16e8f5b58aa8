"""Every message on the wire, by its socket; `README.md` and `weights.md` here are the spec.

A reply carries the request's id in `Header.reply_to`; what a server sends unasked has None there.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from umbra.proto.bounds import (
    FIGURES,
    MEMBERS,
    OWNERS,
    STAGES,
    Blob,
    Checksums,
    Counts,
    Figures,
    Held,
    Id,
    Many,
    ManyBy,
    ManyById,
    Name,
    Number,
    Portion,
    Row,
    Size,
    Stats,
    Text,
    Whole,
)
from umbra.proto.errors import WireError
from umbra.proto.records import (
    SAMPLE,
    BucketsAt,
    EvalReport,
    GpuFacts,
    Ledger,
    Manifest,
    Message,
    NcclRound,
    Record,
    Role,
    Score,
    State,
    Task,
    Told,
    Trajectory,
    with_score,
)
from umbra.proto.records import Header as Header

# -- any socket ---------------------------------------------------------------------------------


class Ok(Message, frozen=True, kw_only=True):
    """Done."""


class Nack(Message, frozen=True, kw_only=True):
    """Refused. `path` names the field at fault, `code` is for programs and `reason` for people."""

    code: Name
    reason: Text
    path: Text = "$"


# -- control socket (buffer: ROUTER) ------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True):
    """A process asks to take part. `endpoints` are those it binds itself (the hub's `weights`)."""

    role: Role
    name: Name
    pid: int
    host: Name
    endpoints: Annotated[dict[Name, Name], Meta(max_length=16)] = {}
    replaces: int = 0  # pid on this host of the process whose place it takes, known to be dead
    vocabulary: int = 0  # trainer: tokens of its model, by which the buffer judges answers
    routers: tuple[int, int, int] | None = None  # trainer: the same of its experts, if replayed


class Welcome(Message, frozen=True, kw_only=True):
    run_id: Name
    heartbeat_s: Number
    data: Name


class Heartbeat(Message, frozen=True, kw_only=True):
    """Alive, and how far. `progress` counts the main loop's work; `idle_s` since it last moved."""

    state: State
    activity: Name
    progress: int
    idle_s: Number
    stats: Stats = {}
    shares: Stats = {}  # of its recent time, by activity


class HeartbeatAck(Message, frozen=True, kw_only=True):
    version: int  # optimizer steps committed
    heartbeat_s: Number = 0.0  # seconds between heartbeats from now on; 0 = as before
    weights: Name = ""  # endpoint of the hub; empty until one has joined
    weights_incarnation: Name = ""  # another one says that the hub was restarted


class Leave(Message, frozen=True, kw_only=True):
    reason: Text  # leases have been handed back before


class Command(Message, frozen=True, kw_only=True):
    """From the buffer, unasked: `drain` = hand back what you hold and leave."""

    kind: Literal["drain"]
    reason: Text = ""


class Ping(Message, frozen=True, kw_only=True):
    """Are you there?"""


class Pong(Message, frozen=True, kw_only=True):
    role: Role
    state: State


class StatusRequest(Message, frozen=True, kw_only=True):
    """Tell the whole state of the run."""


class Member(Told, frozen=True, kw_only=True):
    name: Name
    role: Role
    incarnation: Name
    pid: int
    host: Name
    state: State
    activity: Name
    progress: int
    idle_s: Number
    silent_s: Number  # since its last message
    stats: Stats = {}
    shares: Stats = {}


class Stuck(Told, frozen=True, kw_only=True):
    """Something overdue: its name, holder and age, and the action that was taken."""

    what: Text
    holder: Name
    age_s: Number
    action: Text
    hopeless: Text = ""  # why it lasts until somebody helps; `umbra up` ends such a run in time


class Curves(Record, frozen=True, kw_only=True):
    """Figures of the steps so far, as means over stretches of them, so that they stay few."""

    steps: Many[int] = []  # the last one of each stretch
    values: Annotated[dict[Name, Many[Number | None]], Meta(max_length=FIGURES)] = {}  # by name


class RunWarning(Told, frozen=True, kw_only=True):
    """Nothing is learned, or something is lost: which of the known names, and a sentence on it."""

    name: Name
    text: Text
    figures: Figures
    since: int  # version at which it was first raised
    until: int = -1  # version at which it was over; -1 while it holds


class Rates(Record, frozen=True, kw_only=True):
    steps_per_s: Number = 0.0  # committed recently
    samples_per_s: Number = 0.0  # trained
    answers_per_s: Number = 0.0  # complete answers that were accepted
    issued_per_s: Number = 0.0  # samples
    ended_per_s: Number = 0.0  # samples that are over without being trained on


class Status(Message, frozen=True, kw_only=True):
    run_id: Name
    state: State
    uptime_s: Number
    version: int
    steps: int  # the run's goal
    ledger: Ledger  # of training; evaluations are counted in `evals`
    members: Annotated[list[Member], Meta(max_length=MEMBERS)]
    departed: ManyBy[Text]  # name -> why it is gone
    staleness: Figures  # of the samples trained so far: mean, max, bound
    counters: ManyBy[int]  # rejected messages by reason, expired leases, duplicates, ...
    stuck: Whole[Stuck]
    weights: Name = ""  # endpoint of the hub
    evals: Whole[EvalReport] = []  # oldest first
    staleness_counts: Whole[int] = []  # trained samples by staleness, from 0
    curves: Curves = Curves()
    events: Name = ""  # endpoint for those who watch telemetry
    ending: Text = ""  # why the run ends, once it does
    finished: bool = False  # it ends because all steps are done
    refused: Counts = {}  # who was refused what for lack of the right key, in words
    rates: Rates = Rates()
    health: Figures = {}  # shares of groups, answers and samples that teach nothing
    warnings: Many[RunWarning] = []  # those that hold, and those that are over


class Drain(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator has `member`, or if empty everyone, hand back what it holds and leave.

    A misspelt field is refused, as its default acts on all.
    """

    member: Name = ""
    reason: Text = ""


# -- data socket (buffer: ROUTER) ---------------------------------------------------------------


class LeaseTasks(Message, frozen=True, kw_only=True):
    """A generator asks for samples, or a scorer for trajectories; it may wait `wait_s`."""

    kind: Name = SAMPLE  # or a scoring stage
    capacity: int  # tasks at most
    version: int = 0  # of the weights that a generator serves now
    wait_s: Number


class SubmitResults(Message, frozen=True, kw_only=True):
    """Complete trajectories of a generator, or scores of a scorer. Acknowledged means stored.

    It may ask for samples too, of those there are now, which saves half of the messages.
    """

    trajectories: Portion[Trajectory] = []
    scores: Portion[Score] = []
    capacity: int = 0  # samples that a generator has room for
    version: int = 0  # of the weights it serves now


class RenewLeases(Message, frozen=True, kw_only=True):
    """Still working on these `(sample_id, attempt)`, of which `partials` are to be kept."""

    leases: Held[tuple[Id, int]] = []
    partials: Portion[Trajectory] = []


class TaskLeases(Message, frozen=True, kw_only=True):
    """Tasks to work on, and what became of the results or leases that the request named."""

    tasks: Many[Task] = []
    more_pinned: bool = False  # keep to your version: more samples pinned to it wait for you
    accepted: int = 0  # results
    refused: ManyById[Text] = {}  # results, by sample: why
    lost: Held[Id] = []  # samples to stop working on


class ReturnedSample(Told, frozen=True, kw_only=True):
    """A sample handed back unfinished, with its partial rollout; or `failed`, with the reason."""

    sample_id: Id
    attempt: int
    reason: Text
    failed: bool = False
    partial: Trajectory | None = None


class ReturnTasks(Message, frozen=True, kw_only=True):
    """Samples handed back: an interruption, a drain, or a failure of the environment."""

    samples: Portion[ReturnedSample]


class Interrupt(Message, frozen=True, kw_only=True):
    """To a generator, unasked: stop these `(sample_id, attempt)`, at the latest when the
    environment has answered a turn that it was sent, and hand back their progress.
    """

    leases: Held[tuple[Id, int]]
    reason: Text = ""


# -- telemetry (control socket, then PUB - SUB): may be lost, never changes behaviour -------------


class Event(Message, frozen=True, kw_only=True):
    kind: Name
    fields: Row = {}


class LeaseBatch(Message, frozen=True, kw_only=True):
    """The trainer asks for the batch of optimizer step `step` (1-based), waiting up to `wait_s`."""

    step: int
    wait_s: Number


class BatchLease(Message, frozen=True, kw_only=True):
    """The batch, whole groups in order; empty when it could not be filled within `wait_s`."""

    step: int
    trajectories: Whole[Trajectory]
    waiting_for: Text = ""  # the missing part, in words
    checkpoint: bool = False  # save the state of now before anything else
    evals: Many[EvalReport] = []  # the last ones that are over, for the trainer's curves
    scores: Annotated[
        dict[Id, Whole[Score]], Meta(max_length=STAGES)
    ] = {}  # by stage in their order: what it found, for each of `trajectories`

    def scored(self) -> list[Trajectory]:
        """Return `trajectories` with the scores of all stages; WireError if they do not match."""
        results = self.trajectories
        for stage, scores in self.scores.items():
            if [score.sample_id for score in scores] != [result.sample_id for result in results]:
                raise WireError(f"the scores of stage {stage} are of other samples", path="scores")
            pairs = zip(results, scores, strict=True)
            results = [with_score(result, stage, score) for result, score in pairs]
        return results


class CommitBatch(Message, frozen=True, kw_only=True):
    """The batch of `step` has been trained on. A repeated commit is a no-op."""

    step: int
    metrics: Figures = {}


class CommitAck(Message, frozen=True, kw_only=True):
    version: int
    ledger: Ledger  # after it


class CheckpointSaved(Message, frozen=True, kw_only=True):
    """The trainer can start again after `step`: batches up to it need not be kept any more."""

    step: int


class FinishRun(Message, frozen=True, kw_only=True):
    """The trainer is done: samples in flight end as `cancelled`, everyone drains."""

    reason: Text


class RunFinished(Message, frozen=True, kw_only=True):
    ledger: Ledger  # with nothing in flight any more
    evals: Many[EvalReport] = []  # the last ones that are over


# -- weights socket (hub: ROUTER) ---------------------------------------------------------------


class RegisterManifest(Message, frozen=True, kw_only=True):
    """The trainer states the layout of its weights."""

    manifest: Manifest


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
    checksums: Checksums
    snapshot_s: Number


class PartState(Message, frozen=True, kw_only=True):
    """A part hub states, again and again, that it is there and which arena it holds."""

    owner: Size  # the trainer host whose ranks write the buckets that it hands out
    host: Name  # names the /dev/shm that it sees
    buckets: BucketsAt
    path: Text = ""  # the arena that it was told to hold last
    error: Text = ""  # why it does not


class HoldArena(Message, frozen=True, kw_only=True):
    """To a part hub, unasked: make the arena at `path`, with memory for its own buckets alone."""

    manifest: Manifest
    path: Text  # empty: nothing is to be held any more
    slots: int


class OfferSlot(Message, frozen=True, kw_only=True):
    """To a part hub, unasked: hand out its buckets in `slot` of the arena at `path`."""

    path: Text
    slot: int
    checksums: Checksums  # none: the slot will be overwritten, and nothing of it is handed out
    deltas: bool = False  # to the version before as well


class Subscribe(Message, frozen=True, kw_only=True):
    """A receiver wants every new version, by one of `planes` (in its order of preference)."""

    host: Name
    planes: Annotated[list[Name], Meta(max_length=16)]
    serves: Name = ""  # a relay's weights socket, for the receivers of its host
    buckets: BucketsAt | None = None  # where a relay hands buckets on
    avoid: Name = ""  # endpoint of a relay that did not answer
    gpu: GpuFacts | None = None  # for planes "nccl" and "cuda_ipc"


class Subscribed(Message, frozen=True, kw_only=True):
    """The plane of a subscription. The newest version follows as a push, unless it is "relay"."""

    manifest: Manifest
    plane: Name
    path: Text  # the arena, for plane "shm"; the relay's weights endpoint, for plane "relay"


class Prepare(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: stage `version`, verify it, answer with Ready."""

    epoch: int
    version: int
    slot: int  # of the arena, or of the hub's device memory
    checksums: Checksums
    round: NcclRound | None = None  # for plane "nccl", unless it is to be fetched
    memory: Blob | None = None  # a CUDA IPC handle, for plane "cuda_ipc"
    sources: Annotated[list[BucketsAt], Meta(max_length=OWNERS)] = []  # by owner, or the only one


class Ready(Message, frozen=True, kw_only=True):
    """`version` is staged and verified (or `error` says why not)."""

    epoch: int
    version: int
    wire_s: Number
    stage_s: Number
    error: Text = ""
    wire_bytes: int = 0  # that travelled, after encoding
    source_lost: bool = False  # the reason: whoever it fetches from is gone
    in_place: bool = False  # its engine loads from the hub's slot


class Commit(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: load the staged version at the next token boundary."""

    epoch: int
    version: int


class Committed(Message, frozen=True, kw_only=True):
    epoch: int
    version: int  # which the engine serves now
    commit_s: Number  # for which generation waited
    error: Text = ""


class Abort(Message, frozen=True, kw_only=True):
    """To a receiver, unasked: discard the version staged for this epoch."""

    epoch: int
    version: int
    reason: Text
    dropped: bool = False  # the hub pushes nothing more to it until it subscribes again


class HubStatusRequest(Message, frozen=True, kw_only=True):
    """Does the hub know the process that asks?"""


class HubStatus(Message, frozen=True, kw_only=True):
    """The hub's knowledge of the process that asked: a receiver, or the trainer of its layout."""

    subscribed: bool


TYPES: dict[str, type[Message]] = {cls.__name__: cls for cls in Message.__subclasses__()}
