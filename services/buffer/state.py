"""The state of one run, which the broker's handlers read and change, and its record in the store.

Handlers (`endpoints/`) get the whole of it; its parts are decisions without requests, and know of
each other what their constructors say. `RunRecord` lists what survives a restart: it is saved after
every poll and restored at the start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, TypeAlias, cast, get_type_hints

import msgspec
import xxhash
from msgspec.structs import replace

from umbra.proto.errors import UsageError
from umbra.proto.messages import Stuck
from umbra.proto.records import EvalReport
from umbra.services.buffer.effects import Effects
from umbra.services.buffer.health import Health, StepCurves
from umbra.services.buffer.members import Membership
from umbra.services.buffer.prompts import PromptFeed
from umbra.services.buffer.samples.batches import Admission, Batches
from umbra.services.buffer.samples.evaluation import EVAL_PREFIX, Evaluations, OpenEvaluation
from umbra.services.buffer.samples.groups import GroupRules, LeaseTable
from umbra.services.buffer.samples.journal import Archive, Journal, unfit
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.scoring import Scoring
from umbra.services.buffer.samples.staleness import StalenessPolicy, StalenessStats
from umbra.services.buffer.samples.trajectories import TrajectoryStore
from umbra.services.buffer.store import Store, StoreError
from umbra.services.config import RunConfig
from umbra.services.config.trajectory_rules import RunFacts, samplings_of
from umbra.services.prompts import Prompt

log = logging.getLogger(__name__)


class RunState:
    """Samples, leases, batches, members and evaluations of one run."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        prompts: PromptFeed,
        eval_prompts: Sequence[Prompt] = (),
    ) -> None:
        buffer = self.buffer = config.buffer
        self.config = config
        self.prompts = prompts
        self.counters: Counter[str] = Counter()
        self.outbox = Effects(self.counters)  # of the event that is being handled
        self.members = Membership(buffer)
        self.paused = ""  # why no work is handed out; empty: it is
        self.health = Health(config)
        self.curves = StepCurves()
        self.finished = ""  # why the run is over, once it is
        self.finished_of = 0  # run.steps when it was
        self.committer = ""  # incarnation of the trainer that made the last commit
        self.wanted_since: float | None = None  # when the missing batch was first asked for
        self.policy = StalenessPolicy.of(config)
        self.facts = RunFacts.of(config)
        self.facts.samplings = samplings_of(config)
        self.leases = LeaseTable(buffer.lease_s)
        rules = GroupRules.of(config)
        self.pool = SamplePool(
            rules,
            self.leases,
            TrajectoryStore(store, buffer.stages),
            self.counters,
            on_failure=self.health.failed,
            health=self.health,
        )
        self.journal = Journal(store, self.pool)
        self.batches = Batches(
            self.pool, self.policy, Archive(self.journal), wait=buffer.stale_policy == "wait"
        )
        self.admission = Admission(self.pool, self.batches, self.policy, prompts)
        alone = replace(buffer, group_size=1, straggler_s=0.0, dynamic_sampling=False)
        eval_pool = SamplePool(
            GroupRules(alone, rules.together, rules.only),
            self.leases,
            TrajectoryStore(store, [stage for stage in buffer.stages if stage == "reward"]),
            self.counters,
            prefix=EVAL_PREFIX,
            on_failure=lambda failure: self.evals.failed(failure),
        )
        self.evals = Evaluations(
            eval_pool,
            Journal(store, eval_pool),
            config.eval,
            config.run.steps,
            eval_prompts,
            self.batches,
            self.members,
            self.outbox,
        )
        pools = [eval_pool, self.pool]
        self.scoring = Scoring(pools, self.pool_of, self.leases, self.counters)

    def pool_of(self, sample_id: str) -> SamplePool:
        return self.evals.pool if sample_id.startswith(EVAL_PREFIX) else self.pool

    def counts(self) -> dict[str, int]:
        ledger = self.pool.ledger
        return {
            "steps_per_s": self.batches.version,
            "samples_per_s": ledger.trained,
            "answers_per_s": self.health.answers,
            "issued_per_s": ledger.issued,
            "ended_per_s": ledger.ended.total(),
        }

    def check(self) -> None:
        self.pool.ledger.check()
        self.evals.pool.ledger.check()

    def cancel(self) -> None:
        self.evals.cancel()
        self.batches.cancel()
        for group in list(self.pool.groups.values()):
            self.pool.end(group, "cancelled")


NOW = "now"  # key of the `RunRecord`
MEMBER = "m/"  # prefix of the keys of members

Shares: TypeAlias = dict[str, tuple[int, int]]


class RunRecord(msgspec.Struct, gc=False):
    """The one list of what survives a restart besides groups, batches and members.

    Each field names the attribute path of its value in `RunState`.
    """

    issued: Annotated[int, "pool.ledger.issued"]
    trained: Annotated[int, "pool.ledger.trained"]
    ended: Annotated[dict[str, int], "pool.ledger.ended"]
    next_group: Annotated[int, "pool.next_group"]
    next_sample: Annotated[int, "pool.next_sample"]
    completions: Annotated[int, "pool.completions"]
    filtered_in_a_row: Annotated[int, "pool.filtered_in_a_row"]
    version: Annotated[int, "batches.version"]
    newest: Annotated[int, "batches.newest"]
    checkpoint: Annotated[int | None, "batches.checkpoint"]
    staleness: Annotated[StalenessStats, "batches.trained"]
    last_staleness: Annotated[StalenessStats, "batches.last"]
    committer: Annotated[str, "committer"]
    health: Annotated[Shares, "health.counts"]
    eval_done: Annotated[int, "evals.done"]
    eval_open: Annotated[OpenEvaluation | None, "evals.open"]
    eval_reports: Annotated[list[EvalReport], "evals.reports"]
    eval_issued: Annotated[int, "evals.pool.ledger.issued"]
    eval_ended: Annotated[dict[str, int], "evals.pool.ledger.ended"]
    eval_next_group: Annotated[int, "evals.pool.next_group"]
    eval_next_sample: Annotated[int, "evals.pool.next_sample"]
    finished: Annotated[str, "finished"]
    finished_of: Annotated[int, "finished_of"]
    paused: Annotated[str, "paused"]
    vocabulary: Annotated[int, "facts.vocabulary"]
    routers: Annotated[tuple[int, int, int] | None, "facts.routers"]
    counters: Annotated[dict[str, int], "counters"]
    prompts: dict[str, Any]  # the position in them


PLACES: dict[str, str] = {
    name: kind.__metadata__[0]
    for name, kind in get_type_hints(RunRecord, include_extras=True).items()
    if hasattr(kind, "__metadata__")
}
_values = attrgetter(*PLACES.values())
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RunRecord).decode


def pack_run(run: RunState) -> bytes:
    """Return the encoded `RunRecord` of `run`, without making the record."""
    values: dict[str, Any] = dict(zip(PLACES, _values(run), strict=True))
    values["prompts"] = run.prompts.position()
    return _encode(values)


def put_back(record: RunRecord, run: RunState) -> None:
    """Set the values of `record` in `run`, but for the position in the prompts."""
    for name, path in PLACES.items():
        place, _, last = path.rpartition(".")
        owner = attrgetter(place)(run) if place else run
        value: Any = getattr(record, name)
        before: Any = getattr(owner, last)
        if isinstance(before, Counter):  # shared by those who count
            counts = cast("Counter[str]", before)
            counts.clear()
            counts.update(value)
        else:
            setattr(owner, last, value)


class Recovery:
    """The persistence of one run's state; the sizes must stay the same.

    So must `run_id`, but where the store is inside of the run's folder, which may be copied.
    """

    def __init__(self, run: RunState, run_id: str) -> None:
        self._run = run
        self._journal = run.journal
        self._same: dict[str, Any] = {
            "run_id": run_id,
            "buffer.group_size": run.buffer.group_size,
            "buffer.batch_groups": run.buffer.batch_groups,
            "buffer.stages": list(run.buffer.stages),
        }
        if only := run.pool.rules.only:  # samples of others have not been left to scorers
            self._same["[[environments]] of reward_scope group"] = sorted(only)
        self._is_inside = not run.buffer.store
        self._last = b""

    def save(self) -> None:
        journal, members = self._journal, self._run.members
        for name in members.changed:
            record = members.record(name)
            if record is None:
                journal.store.delete(_key(MEMBER, name))
            else:
                journal.write(_key(MEMBER, name), record)
        members.changed.clear()
        changed = journal.save()
        changed |= self._run.evals.journal.save()
        now = pack_run(self._run)
        if changed or now != self._last:
            self._last = now
            journal.store.put(NOW, now)

    def restore(self, now: float) -> bool:
        """Take over the state in the store; False if there is none.

        Raises:
            UsageError: the store is of another run, or of one with other sizes.
            StoreError: the store does not fit together.
        """
        journal, run = self._journal, self._run
        same = journal.read("run")
        if same is None:
            journal.write("run", self._same)
            return False
        for key, value in self._same.items():
            if same.get(key) != value and not (key == "run_id" and self._is_inside):
                raise UsageError(
                    f"the store is of a run with {key} = {same.get(key)}, this one has {value}: "
                    "choose another --run-dir, or set it as before"
                )
        if same != self._same:  # a copied or renamed folder is a run of the name that it has now
            journal.write("run", self._same)
        try:
            record = _decode(journal.store.get(NOW))
        except (KeyError, msgspec.MsgspecError) as error:
            raise StoreError(
                f"the counts of the run in the store cannot be read ({error}): begin a new run"
            ) from error
        put_back(record, run)
        trajectories = journal.trajectories()
        groups = journal.load(trajectories)
        run.batches.restore({group.group_id: group for group in groups}, trajectories, now)
        run.pool.restore(groups, now)
        run.evals.restore(now)
        run.members.restore([journal.read(key) for key in journal.store.keys(MEMBER)], now)
        run.prompts.seek(record.prompts)
        if missing := run.pool.ledger.snapshot().balance:
            raise unfit(f"{missing} samples are unaccounted for")
        return True


def _key(prefix: str, name: str) -> str:
    return prefix + xxhash.xxh3_128_hexdigest(name.encode())


class DiskQuota:
    """A quota that stops the issue of new groups while there is no room for them.

    Samples in flight go on, so that the trainer can commit and save the checkpoint that lets old
    batches go. A trainer that has never saved one could not use them, so they go right away.
    """

    def __init__(self, run: RunState) -> None:
        self._store = run.journal.store
        self._pool = run.pool
        self._batches = run.batches
        self._max_bytes = run.buffer.store_max_bytes
        self._batch_groups = run.buffer.batch_groups
        self._disk = ""  # what the disk said, while it is full
        self._since: float | None = None
        self._hopeless_since: float | None = None  # from when on no batch can be made

    def full(self, reason: str) -> None:
        """Set the store's complaint about a full disk; empty = there is room."""
        self._disk = reason

    def check(self, now: float) -> None:
        needed, reason = self._store.size_bytes, self._disk
        pool, archive = self._pool, self._batches.archive
        if needed >= self._max_bytes and self._batches.checkpoint is None and archive.steps:
            if not pool.counters["batches_let_go"]:
                log.warning(
                    "buffer.store_max_bytes = %d is reached and the trainer saves no checkpoints: "
                    "its first batches are deleted, so it could not restart from step 1",
                    self._max_bytes,
                )
            pool.counters["batches_let_go"] += 1
            archive.drop_through(archive.steps[0])  # the next one with the next poll
        elif needed >= self._max_bytes and not reason:
            reason = (
                f"the store has {needed} bytes in use and buffer.store_max_bytes is "
                f"{self._max_bytes}: allow more, or save checkpoints more often"
            )
        if reason and not pool.blocked:
            log.warning("no new groups: %s", reason)
            pool.counters["store_full"] += 1
            self._since = now
        elif pool.blocked and not reason:
            log.info("there is room in the store again")
            self._since = None
            pool.openings += 1
        pool.blocked = reason
        ledger, few = pool.ledger, len(pool.complete) < self._batch_groups
        idle = ledger.live - ledger.trained == ledger.count("ready") and not archive.steps
        if not (reason and idle and few):
            self._hopeless_since = None
        elif self._hopeless_since is None:
            self._hopeless_since = now

    def stuck(self, now: float) -> list[Stuck]:
        if self._since is None:
            return []
        what = f"new groups: {self._pool.blocked}"
        action = "none are issued until there is room; samples in flight go on"
        age_s, full = now - self._since, f"{self._pool.blocked} (free some)" if self._disk else ""
        if not full and self._hopeless_since is not None:
            age_s = now - self._hopeless_since
            full = f"no room for a batch in buffer.store_max_bytes = {self._max_bytes} (raise it)"
        return [Stuck(what=what, holder="buffer", age_s=age_s, action=action, hopeless=full)]
