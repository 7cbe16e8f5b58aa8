"""The state of one run, which the broker's handlers read and change, and its record in the store.

Handlers (`endpoints/`) get the whole of it; its parts are decisions without requests, and know of
each other what their constructors say. `SURVIVING` lists what survives a restart: it is saved after
every poll and restored at the start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import msgspec
import xxhash
from msgspec.structs import replace

from umbra.proto.errors import UsageError
from umbra.proto.messages import State, Stuck
from umbra.proto.records import EvalReport
from umbra.services.buffer.effects import Effects
from umbra.services.buffer.health import Health, StepCurves
from umbra.services.buffer.members import Membership
from umbra.services.buffer.prompts import PromptFeed
from umbra.services.buffer.samples.batches import Batches
from umbra.services.buffer.samples.evaluation import EVAL_PREFIX, Evaluations, OpenEvaluation
from umbra.services.buffer.samples.groups import LeaseTable
from umbra.services.buffer.samples.journal import Journal, unfit
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.staleness import StalenessPolicy, StalenessStats
from umbra.services.buffer.store import Store, StoreError, Value
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
        self.health = Health(config)
        self.curves = StepCurves()
        self.policy = StalenessPolicy.of(config)
        self.facts = RunFacts.of(config)
        self.facts.samplings = samplings_of(config)
        self.leases = LeaseTable(buffer.lease_s)
        self.state: State = "ready"
        self.ending = ""  # why the run ends, once it does
        self.finished = ""  # why the run is over, once it is
        self.finished_of = 0  # run.steps when it was
        self.committer = ""  # incarnation of the trainer that made the last commit
        self.wanted_since: float | None = None  # when the missing batch was first asked for
        together = "reward" if config.rewarded_by_groups else ""
        only = frozenset(e.name for e in config.environments if e.reward_scope == "group")
        shared = self.leases, self.counters, together, only
        journal = Journal(store, tuple(buffer.stages))
        self.pool = SamplePool(journal, buffer, *shared, self.health.failed, self.health)
        wait = buffer.stale_policy == "wait"
        self.batches = Batches(self.pool, self.policy, prompts, wait=wait)
        journal = Journal(store, tuple(s for s in buffer.stages if s == "reward"), EVAL_PREFIX)
        alone = replace(buffer, group_size=1, straggler_s=0.0, dynamic_sampling=False)
        eval_pool = SamplePool(journal, alone, *shared, lambda failure: self.evals.failed(failure))
        steps, members = config.run.steps, self.members
        self.evals = Evaluations(
            eval_pool, config.eval, steps, eval_prompts, self.batches, members, self.outbox
        )
        self.pools = (eval_pool, self.pool)

    def pool_of(self, sample_id: str) -> SamplePool:
        return self.evals.pool if sample_id.startswith(EVAL_PREFIX) else self.pool

    def waiting(self, stage: str) -> int:
        """Count the trajectories waiting in a scoring stage; some of them may be over."""
        return sum(len(pool.unscored.get(stage, ())) for pool in self.pools)

    def check(self) -> None:
        for pool in self.pools:
            pool.ledger.check()

    def counts(self) -> dict[str, int]:
        ledger = self.pool.ledger
        return {
            "steps_per_s": self.batches.version,
            "samples_per_s": ledger.trained,
            "answers_per_s": self.health.answers.seen,
            "issued_per_s": ledger.issued,
            "ended_per_s": ledger.ended.total(),
        }

    def cancel(self) -> None:
        self.evals.cancel()
        self.batches.cancel()
        for group in list(self.pool.groups.values()):
            self.pool.end(group, "cancelled")


NOW = "now"  # key of the values of `SURVIVING`
MEMBER = "m/"  # prefix of the keys of members

# The one list of what survives a restart besides groups, batches, members and the position in the
# prompts: attribute paths in `RunState`, and types.
SURVIVING: dict[str, Any] = {
    "pool.ledger.issued": int,
    "pool.ledger.trained": int,
    "pool.ledger.ended": dict[str, int],
    "pool.next_group": int,
    "pool.next_sample": int,
    "pool.completions": int,
    "pool.filtered_in_a_row": int,
    "batches.version": int,
    "batches.newest": int,
    "batches.checkpoint": int | None,
    "batches.trained": StalenessStats,
    "batches.last": StalenessStats,
    "evals.done": int,
    "evals.open": OpenEvaluation | None,
    "evals.reports": list[EvalReport],
    "evals.pool.ledger.issued": int,
    "evals.pool.ledger.ended": dict[str, int],
    "evals.pool.next_group": int,
    "evals.pool.next_sample": int,
    "committer": str,
    "finished": str,
    "finished_of": int,
    "facts.vocabulary": int,
    "facts.routers": tuple[int, int, int] | None,
    "counters": dict[str, int],
}
_Record: Any = msgspec.defstruct(
    "RunRecord",
    [*((path.replace(".", "_"), kind) for path, kind in SURVIVING.items()), ("prompts", Any)],
    array_like=True,
)
_values = attrgetter(*SURVIVING)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Record).decode


def pack_run(run: RunState) -> bytes:
    return _encode((*_values(run), run.prompts.position()))


def unpack_run(packed: Value, run: RunState) -> None:
    """Set the values in `run` that `pack_run` packed; raises as `PromptFeed.seek`."""
    *values, position = msgspec.structs.astuple(_decode(packed))
    for path, value in zip(SURVIVING, values, strict=True):
        place, _, last = path.rpartition(".")
        owner = attrgetter(place)(run) if place else run
        before: Any = getattr(owner, last)
        if isinstance(before, Counter):  # shared by those who count
            counts = cast("Counter[str]", before)
            counts.clear()
            counts.update(value)
        else:
            setattr(owner, last, value)
    run.prompts.seek(position)


class Recovery:
    """The persistence of one run's state; the sizes must stay the same.

    So must `run_id`, but where the store is inside of the run's folder, which may be copied.
    """

    def __init__(self, run: RunState, run_id: str) -> None:
        self._run = run
        self._journal = run.pool.journal
        self._same: dict[str, Any] = {
            "run_id": run_id,
            "buffer.group_size": run.buffer.group_size,
            "buffer.batch_groups": run.buffer.batch_groups,
            "buffer.stages": list(run.buffer.stages),
            "environments of reward_scope group": sorted(
                environment.where for environment in run.config.rewarded_by_groups
            ),
            # A trajectory has what these need from its first token to its last, or not at all.
            "trainer.router_replay": run.config.trainer.router_replay,
            "trainer.score_centering": run.config.trainer.score_centering,
        }
        self._last = b""

    def save(self) -> None:
        journal, members = self._journal, self._run.members
        for name in members.changed:
            key = MEMBER + xxhash.xxh3_128_hexdigest(name.encode())
            if record := members.record(name):
                journal.write(key, record)
            else:
                journal.store.delete(key)
        members.changed.clear()
        changed = [pool.journal.save() for pool in self._run.pools]
        now = pack_run(self._run)
        if any(changed) or now != self._last:
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
        for key, value in self._same.items() if same else ():
            if same.get(key, value) != value and (key != "run_id" or run.buffer.store):
                raise UsageError(
                    f"the store is of a run with {key} = {same.get(key)}, this one has {value}: "
                    "set it as before, or begin another run"
                )
        if same != self._same:  # a copied or renamed folder is a run of the name that it has now
            journal.write("run", self._same)
        if same is None:
            return False
        try:
            unpack_run(journal.store.get(NOW), run)
        except (KeyError, msgspec.MsgspecError) as error:
            raise StoreError(
                f"the counts of the run in the store cannot be read ({error}): begin a new run"
            ) from error
        trajectories = journal.scored()
        groups = journal.load(trajectories)
        run.batches.restore(groups, trajectories, now)
        run.pool.restore(groups, now)
        run.evals.restore(now)
        run.members.restore([journal.read(key) for key in journal.store.keys(MEMBER)], now)
        if missing := sum(pool.ledger.snapshot().balance for pool in run.pools):
            raise unfit(f"{missing} samples are unaccounted for")
        run.batches.sweep()  # its bound may have been lowered
        return True


@dataclass(eq=False)
class DiskQuota:
    """A quota that stops the issue of new groups while there is no room for them.

    Samples in flight go on, so that the trainer can commit and save the checkpoint that lets old
    batches go. A trainer that has never saved one could not use them, so they go right away.
    """

    run: RunState
    disk: str = ""  # the store's complaint about a full disk, while it is full
    _since: float | None = None
    _hopeless_since: float | None = None  # from when on no batch can be made

    def check(self, now: float) -> None:
        pool, batches, reason = self.run.pool, self.run.batches, self.disk
        needed, limit = pool.journal.store.size_bytes, self.run.buffer.store_max_bytes
        if needed >= limit and batches.checkpoint is None and batches.kept:
            if not pool.counters["batches_let_go"]:
                log.warning(
                    "buffer.store_max_bytes = %d is reached and the trainer saves no checkpoints: "
                    "its first batches are deleted, so it could not restart from step 1",
                    limit,
                )
            pool.counters["batches_let_go"] += 1
            batches.drop_through(batches.kept[0])  # the next one with the next poll
        elif needed >= limit and not reason:
            reason = (
                f"the store has {needed} bytes in use and buffer.store_max_bytes is "
                f"{limit}: allow more, or save checkpoints more often"
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
        ledger, few = pool.ledger, len(pool.complete) < self.run.buffer.batch_groups
        idle = ledger.live - ledger.trained == ledger.in_flight["ready"] and not batches.kept
        if not (reason and idle and few):
            self._hopeless_since = None
        elif self._hopeless_since is None:
            self._hopeless_since = now

    def stuck(self, now: float) -> list[Stuck]:
        if self._since is None:
            return []
        blocked, age_s = self.run.pool.blocked, now - self._since
        hopeless = f"{blocked} (free some)" if self.disk else ""
        if not hopeless and self._hopeless_since is not None:
            age_s = now - self._hopeless_since
            limit = self.run.buffer.store_max_bytes
            hopeless = f"no room for a batch in buffer.store_max_bytes = {limit} (raise it)"
        what = f"new groups: {blocked}"
        action = "none are issued until there is room; samples in flight go on"
        return [Stuck(what=what, holder="buffer", age_s=age_s, action=action, hopeless=hopeless)]
