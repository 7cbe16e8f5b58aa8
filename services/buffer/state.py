"""The state of one run: what the broker's handlers read and change.

Handlers (`endpoints/`) get the whole of it; its parts are decisions without requests, and know of
each other what their constructors say. `persistence.RunRecord` lists what survives a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from umbra.services.buffer.effects import Effects
from umbra.services.buffer.health import Health, StepCurves
from umbra.services.buffer.members import Membership
from umbra.services.buffer.prompts import PromptFeed
from umbra.services.buffer.samples.batches import Admission, Batches
from umbra.services.buffer.samples.evaluation import EVAL_PREFIX, Evaluations
from umbra.services.buffer.samples.groups import GroupRules
from umbra.services.buffer.samples.journal import Archive, Journal
from umbra.services.buffer.samples.leases import LeaseTable
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.scoring import Scoring
from umbra.services.buffer.samples.staleness import StalenessPolicy
from umbra.services.buffer.samples.trajectories import TrajectoryStore
from umbra.services.buffer.store import Store
from umbra.services.config import RunConfig
from umbra.services.config.trajectory_rules import RunFacts, samplings_of
from umbra.services.prompts.rows import Prompt


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
