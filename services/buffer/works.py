"""The parts of the broker that move samples, put together as the configuration says."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from umbra.services.buffer.data.prompts import Prompt, Prompts
from umbra.services.buffer.effects import Effects
from umbra.services.buffer.endpoints.evaluation import EvalAnswers, Evaluations
from umbra.services.buffer.endpoints.generator import EVAL_PREFIX, GeneratorEndpoint
from umbra.services.buffer.endpoints.scorer import ScorerEndpoint
from umbra.services.buffer.endpoints.scoring import Scoring
from umbra.services.buffer.endpoints.trainer import TrainerEndpoint
from umbra.services.buffer.health import Health
from umbra.services.buffer.membership import Membership, Participant
from umbra.services.buffer.policy.batches import Batches
from umbra.services.buffer.policy.cancellation import Cancellations
from umbra.services.buffer.policy.leases import Leases
from umbra.services.buffer.policy.pause import PauseSwitch
from umbra.services.buffer.policy.replays import Replays
from umbra.services.buffer.policy.run_ahead import RunAhead
from umbra.services.buffer.policy.selection import BatchRules
from umbra.services.buffer.policy.staleness import StalenessPolicy
from umbra.services.buffer.samples.groups import GroupRules
from umbra.services.buffer.samples.pool import SamplePool
from umbra.services.buffer.samples.submissions import Submissions
from umbra.services.buffer.samples.trajectory_store import TrajectoryStore
from umbra.services.buffer.store.api import Store
from umbra.services.buffer.store.archive import Archive
from umbra.services.buffer.store.journal import Journal
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.trajectories import RunFacts, sampling_of

log = logging.getLogger(__name__)


class Works:
    """Pools, leases, answers, scoring, evaluations and training of one run.

    Args:
        config: of the run.
        store: keeps all samples.
        prompts: to train on.
        eval_prompts: to evaluate on; none, no evaluations.
        members: of the run.
        missing: tells in words what the next batch waits for, at a time.
        counters: of the broker.
        outbox: of the broker.
    """

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        prompts: Prompts,
        eval_prompts: Sequence[Prompt],
        members: Membership,
        *,
        missing: Callable[[float], str],
        counters: Counter[str],
        outbox: Effects,
    ) -> None:
        buffer = config.buffer
        self.counters = counters
        self.gate = PauseSwitch()
        self.health = Health(config)
        self.policy = StalenessPolicy.of(config)
        self.facts = RunFacts.of(config)
        self.facts.sampling = sampling_of(config.sampling)
        self.pool = SamplePool(
            rules=GroupRules.of(buffer),
            lease_s=buffer.lease_s,
            max_attempts=buffer.max_attempts,
            trajectory_store=TrajectoryStore(store, buffer.stages),
            counters=counters,
            stages=buffer.stages,
        )
        eval_stages = [stage for stage in buffer.stages if stage == "reward"]
        eval_pool = SamplePool(
            rules=GroupRules(size=1),
            lease_s=buffer.lease_s,
            max_attempts=buffer.max_attempts,
            trajectory_store=TrajectoryStore(store, eval_stages),
            counters=counters,
            stages=eval_stages,
            prefix=EVAL_PREFIX,
        )
        self.journal = Journal(store, self.pool)
        rules = BatchRules.of(buffer)
        replays = Replays(self.journal, self.policy, rules.times)
        self.batches = Batches(
            self.pool,
            self.policy,
            rules,
            Archive(self.journal, replays),
            replays,
            restart_stale=buffer.stale_policy == "restart",
        )
        self.run_ahead = RunAhead(buffer.run_ahead, buffer.min_ess)
        self.leases = Leases(
            self.pool, self.batches, self.policy, prompts, self.run_ahead, buffer, counters
        )
        self.evals = Evaluations(
            eval_pool,
            Journal(store, eval_pool),
            config.eval,
            eval_prompts,
            self.batches,
            members,
            outbox,
        )
        self.rollouts = GeneratorEndpoint(
            self.pool,
            self.batches,
            self.leases,
            Submissions(
                self.pool, self.batches, self.policy, self.facts, counters, self.health.answered
            ),
            self.evals,
            EvalAnswers(eval_pool, self.batches, self.policy, self.facts, counters),
            self.gate,
            counters,
            outbox,
        )
        self.scoring = Scoring(
            [eval_pool, self.pool],
            lease_s=buffer.score_lease_s,
            max_attempts=buffer.score_attempts,
            counters=counters,
        )
        self.scorers = ScorerEndpoint(self.scoring, list(buffer.stages), counters, outbox)
        self.interrupts = Cancellations(
            self.pool,
            self.batches,
            self.policy,
            members,
            on_batch=buffer.on_batch,
            counters=counters,
            outbox=outbox,
        )
        self.training = TrainerEndpoint(
            self.pool,
            self.batches,
            steps=config.run.steps,
            missing=missing,
            gate=self.gate,
            evals=self.evals,
            formed=self.interrupts.batch_formed,
            run_ahead=self.run_ahead,
            health=self.health,
            facts=self.facts,
            counters=counters,
            outbox=outbox,
        )
        self._prompts = prompts
        self._outbox = outbox

    def counts(self) -> dict[str, int]:
        """What `Throughput` measures."""
        ledger = self.pool.ledger
        return {
            "steps_per_s": self.batches.version,
            "samples_per_s": ledger.trained,
            "answers_per_s": self.health.answers,
            "issued_per_s": ledger.issued,
            "ended_per_s": ledger.ended.total(),
        }

    def tick(self, now: float) -> None:
        """Leases that expire, waits that are over."""
        self.pool.expire(now)
        self.evals.pool.expire(now)
        self.scorers.expire(now)
        self.rollouts.expire(now)
        self.training.expire(now)
        for warning in self.health.look(self.batches.version):
            log.warning("%s: %s", warning.name, warning.text)
            self._outbox.measure(
                "warning", name=warning.name, text=warning.text, figures=warning.figures
            )

    def settle(self, now: float) -> None:
        """Serve what is parked with whatever an event has opened up; check the balances."""
        if not self.training.closed:
            self.evals.advance(now)
        for end in self.pool.group_ends:
            self._prompts.ended(end)
            if end.reason != "failed":
                self.health.group(end.rewards)
        self.pool.group_ends.clear()
        for failure in self.pool.failures:
            self.health.failed(failure)
        self.pool.failures.clear()
        self.evals.pool.failures.clear()  # they are told in its report
        self.training.serve(now)
        self.scorers.serve(now)
        self.rollouts.serve(now)
        self.pool.ledger.check()
        self.evals.pool.ledger.check()

    def resume(self) -> None:
        """Hand out again, after a pause."""
        self.gate.open()
        self.pool.openings += 1  # the parked questions are worth another look

    def take_back(self, peer: Participant, *, lost: bool) -> None:
        """What `peer` holds goes to others; a batch stays leased for the next trainer."""
        count = self.pool.take_all_back(peer.name, lost=lost)
        count += self.evals.pool.take_all_back(peer.name, lost=lost)
        count += self.scorers.take_back(peer.name, lost=lost)
        if count:
            log.info("took %d samples back from %s", count, peer.name)
            self.counters["taken_back"] += count
        self.rollouts.forget(peer.name)
        if peer.role == "trainer":
            self.training.forget()

    def close(self, now: float) -> None:
        """No more work for anyone."""
        self.rollouts.close()
        self.scorers.close(now)
        self.training.close()

    def cancel(self) -> None:
        """End all that is in flight."""
        self.evals.cancel()
        self.batches.cancel()
        for group in list(self.pool.groups.values()):
            self.pool.end(group, "cancelled")
