"""The training loop: lease a batch, learn from it, commit it, save and publish the new weights.

All ranks run it. Rank 0 passes the run's messages on in the control group (`Ranks`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from umbra.proto.errors import DivergedError, UsageError
from umbra.services.config.trajectory_rules import RunFacts
from umbra.services.process.command import ServiceContext
from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.learner import REASONS, Learner
from umbra.services.trainer.member import NextStep, RunMember
from umbra.services.trainer.metrics import Row, environment_metrics, finite, sample_metrics
from umbra.services.trainer.snapshot import Snapshots
from umbra.services.trainer.speed import traced
from umbra.services.trainer.update import PolicyUpdate


class Loop:
    """Training to `run.steps`, from the step that `saver` has begun. `member` is rank 0's alone.

    The version counts committed optimizer steps.
    """

    def __init__(
        self,
        context: ServiceContext,
        learner: Learner,
        update: PolicyUpdate,
        snapshots: Snapshots,
        saver: Saver,
        member: RunMember | None,
    ) -> None:
        self.version = saver.begun
        self._context, self._config = context, context.config
        self._learner, self._ranks, self._update = learner, learner.ranks, update
        self._snapshots, self._saver, self._member = snapshots, saver, member
        self._facts = RunFacts.of(context.config, learner.model.config.vocab_size)
        self._facts.routers = learner.replayed
        self._skips = SkipLimit(context.config.trainer.max_skipped)
        self._committed: tuple[Row, int] | None = None  # of the last step: its row, all updates

    def run(self) -> bool:
        """Train; True when all steps are done, False when asked to stop before.

        A batch that is not committed goes back to the buffer when rank 0 leaves.
        """
        assert self._context.run_dir is not None
        self._learner.phases.take()  # time before the first step
        while (step := self.version + 1) <= self._config.run.steps:
            file = self._context.run_dir / f"profile/step-{step}.rank-{self._ranks.rank}.json.gz"
            chosen = step in self._config.trainer.profile_steps
            with traced(file) if chosen else nullcontext():
                batch = self._lease()
                row = self._train(batch) if batch is not None else None
                if batch is None or row is None or not self._commit(row):
                    return False
                with self._phase("checkpoint"):
                    self._saver.after(step, row)
                published = self.publish()
            seconds = self._learner.phases.take()
            if self._member is not None:
                self._member.report(self.version, row, seconds, batch)
            if not published:
                return False
            self._check(row)
        return True

    def save(self) -> None:
        """Make a checkpoint of the steps that the last one does not cover, and see it through."""
        if self._member is not None:
            self._member.session.progress("saving the last checkpoint")
        row, updates = self._committed or (None, 0)
        clean = updates == self._learner.updates  # else the weights are of no version
        outcomes = self._saver.last(self.version, row if clean else None)
        if self._member is not None:
            self._member.saved(outcomes)

    def publish(self) -> bool:
        """Hand the current weights to the hub; receivers get them while training goes on.

        False when asked to stop and the hub does not answer any more: it ends too.

        Raises:
            DeadlineError: no slot became free in time.
        """
        member, slot, place = self._member, None, None
        with self._phase("wait_slot"):
            if member is not None and (slot := member.slot(self.version)) is not None:
                place = member.publisher.place
            place = self._ranks.spread(place, tuple[str, int] | None)
        if place is None:
            return False
        with self._phase("snapshot"):
            begin = time.perf_counter()
            sums = self._snapshots.write(place, slot)
            snapshot_s = time.perf_counter() - begin
        if member is not None:
            member.publish(self.version, snapshot_s, sums)
        return True

    def _lease(self) -> TrainBatch | None:
        """Lease the next batch, None when asked to stop; BatchError for unsound samples."""
        with self._phase("wait_batch"):
            while True:
                outcomes, turn = self._saver.settled(), NextStep()
                if self._member is not None:
                    self._member.saved(outcomes)
                    turn = self._member.turn(self.version + 1)
                turn = self._ranks.spread(turn, NextStep)
                if turn.stop:
                    return None
                if turn.save and self._committed is not None:
                    with self._phase("checkpoint"):
                        self._saver.wanted(self.version, self._committed[0])
                if turn.trajectories:
                    facts = self._facts
                    model_facts = facts.vocabulary, facts.tokens, facts.routers
                    return make_batch(turn.trajectories, *model_facts, centered=facts.centered)

    def _train(self, batch: TrainBatch) -> Row | None:
        """Learn from a batch; return the row of the step, or None when asked to stop."""
        member, step = self._member, self.version + 1
        with self._phase("train_step"):
            update = self._update(
                batch, self.version, lambda: member is None or member.keep_going(step)
            )
        if update is None:
            return None
        names = [section.name for section in self._config.environments]
        metrics = sample_metrics(batch, self.version) | environment_metrics(batch.samples, names)
        return finite(metrics | update)

    def _commit(self, row: Row) -> bool:
        """Commit the batch; from here on the version is one higher. False when asked to stop."""
        with self._phase("commit"):
            done = self._member is None or self._member.commit(self.version + 1, row)
            done = self._ranks.agree(done)
        self.version += done
        # Without an answer the critic may have learned a batch that is not committed.
        self._committed = (row, self._learner.updates) if done else None
        return done

    def _check(self, row: Row) -> None:
        """Log that an update was left out; all ranks end if that was one too many."""
        best = self._config.checkpoint.best_metric.removeprefix("-")
        # Not every batch has every part of a reward; all other columns are in every row.
        if best and best not in row and not best.startswith("reward_part/"):
            raise UsageError(
                f"checkpoint.best_metric: {best!r} is no metric of a step; use one of "
                f"{', '.join(sorted(row))}"
            )
        reason = self._skips.see(row, self.version)
        if reason and self._member is not None:
            self._context.log.warning(
                "step %d: an update was skipped, because %s", self.version, reason
            )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`; rank 0 writes it as a span."""
        span = nullcontext() if self._member is None else self._context.metrics.span(name)
        with span, self._learner.phases(name):
            yield


@dataclass
class SkipLimit:
    """A counter of batches whose updates were all left out; `limit` in a row are too many."""

    limit: int
    count: int = 0

    def see(self, row: Row, step: int) -> str:
        """Return why updates of this batch were left out, in words; empty if none was.

        Raises:
            DivergedError: it was one too many.
        """
        reason = " and ".join(text for name, text in REASONS.items() if row[f"skipped/{name}"])
        self.count = self.count + 1 if row["skipped"] == 1.0 else 0
        if self.count >= self.limit:
            raise DivergedError(
                f"stopped at step {step}: the updates of the last {self.count} batches were "
                f"skipped, because {reason}; the weights are of step {step - self.count}: lower "
                "trainer.learning_rate or trainer.max_grad_norm, or choose an objective that clips"
            )
        return reason
