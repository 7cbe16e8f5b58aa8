"""The training loop: lease a batch, learn from it, commit it, publish the new weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, DivergedError, RejectedError, UmbraError, UsageError
from umbra.proto.messages import (
    BatchLease,
    CheckpointSaved,
    CommitAck,
    CommitBatch,
    LeaseBatch,
    Ok,
)
from umbra.proto.net.session import Session
from umbra.services.config.trajectory_rules import RunFacts
from umbra.services.process.command import ServiceContext
from umbra.services.reporting.tables import size
from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.checkpoints.saver import SaveOutcome, Saver
from umbra.services.trainer.distributed.commands import (
    Save,
    Snapshot,
    Stop,
    Train,
    send_command,
)
from umbra.services.trainer.distributed.shards import Snapshots
from umbra.services.trainer.guard import SkipLimit
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import (
    Row,
    environment_metrics,
    finite,
    peak_memory_gib,
    sample_metrics,
    speed_metrics,
)
from umbra.services.trainer.phases import Profile
from umbra.services.trainer.rollout_log import RolloutLog
from umbra.services.trainer.sinks import Sinks
from umbra.services.trainer.update import Update
from umbra.services.weights.publisher import Publisher

LEASE_SLICE_S = 1.0  # how long one request for a batch is parked, so that a stop is noticed
# What the monitor shows of a step.
SHOWN = {
    "reward": "reward/mean",
    "loss": "loss",
    "staleness": "staleness/total/mean",
    "ess": "ess",
    "k3": "mismatch/k3",
    "k3_on_policy": "mismatch/k3_on_policy",
    "compared": "mismatch/compared",
    "outliers": "outliers",
    "train_tokens_per_s": "train_tokens_per_s",
}


class Loop:
    """Trains to `run.steps`. The version counts committed optimizer steps.

    It begins at that of the checkpoint that `saver` names, which `learner` has loaded; or at 0.
    """

    def __init__(
        self,
        context: ServiceContext,
        session: Session,
        learner: Learner,
        update: Update,
        snapshots: Snapshots,
        publisher: Publisher,
        saver: Saver,
        sinks: Sinks,
        rollouts: RolloutLog,
    ) -> None:
        self.version = saver.begun
        self._context = context
        self._config = context.config
        self._session = session
        self._learner = learner
        self._snapshots = snapshots
        self._publisher = publisher
        self._grace_s = context.config.run.broker_grace_s  # what the buffer may be away for
        self._update = update
        self._saver = saver
        self._sinks = sinks
        self._rollouts = rollouts
        self._facts = RunFacts.of(context.config, learner.model.config.vocab_size)
        self._facts.routers = learner.replayed
        self._patience = SkipLimit(context.config.trainer.max_skipped)
        self._row: Row | None = None  # of the last step; None while the weights are of no version
        assert context.run_dir is not None
        steps = context.config.trainer.profile_steps
        self._profile = Profile(context.run_dir / "profile", steps)

    def close(self) -> None:
        """End the profiler's trace."""
        self._profile.end()

    def run(self) -> bool:
        """Train; True when all steps are done, False when asked to stop before.

        A batch that is not committed goes back to the buffer when this process leaves.
        """
        self._learner.phases.take()  # what was before the first step
        while self.version < self._config.run.steps:
            self._profile.begin(self.version + 1)
            with self._phase("wait_batch"):
                batch = self._lease()
            if batch is None:
                return False
            with self._phase("train_step"):
                send_command(self._learner.ranks, Train(self.version, batch.samples))
                kept, self._row = self._row, None
                updates = self._learner.updates
                learned = self._update(batch, self.version, self._keep_going)
            if learned is None:
                if self._learner.updates == updates:
                    self._row = kept
                return False
            names = [one.name for one in self._config.environments]
            seen = sample_metrics(batch, self.version)
            row = finite(seen | environment_metrics(batch.samples, names) | learned)
            with self._phase("commit"):
                if not self._commit(row):
                    return False
            self._row = row
            with self._phase("checkpoint"):
                send_command(self._learner.ranks, Save("after", self.version))
                self._saver.after(self.version, row)
            published = self.publish()
            self._profile.end()
            self._report(row)
            self._rollouts.step(self.version, batch.samples)
            if not published:
                return False
            self._judge(row)
        return True

    def resume(self) -> None:
        """Tell the buffer which steps need not be repeated, if training goes on from a checkpoint.

        Raises:
            UsageError: the checkpoint is not of the buffer's run.
        """
        if not self.version:
            return
        try:
            self._tell_covered()
        except RejectedError as error:
            raise UsageError(
                f"{self._saver.folder.of(self.version)} is not of the run that the buffer has "
                f"({error}): choose another --run-dir, or give the buffer the store of that run"
            ) from error
        self._context.log.info("going on from the checkpoint of step %d", self.version)

    def save(self) -> None:
        """Make a checkpoint of the steps that the last one does not cover, and see it through."""
        self._session.progress("saving the last checkpoint")
        step = self.version if self._row is not None else -1
        send_command(self._learner.ranks, Save("last", step))
        self._saved(self._saver.last(self.version, self._row))

    def publish(self) -> bool:
        """Hand the current weights to the hub; the receivers get them while training goes on.

        False when asked to stop and the hub does not answer any more: it ends too.

        Raises:
            DeadlineError: no slot became free in time.
        """
        self._session.progress(f"snapshot of version {self.version}")
        nbytes = self._publisher.manifest.total_bytes
        timeout_s = 2 * self._config.weight_hub.pace.limit_s(nbytes)
        with self._phase("wait_slot"):
            try:
                slot = self._publisher.slot(self.version, timeout_s)
            except DeadlineError:
                if self._session.stopping.is_set():
                    return False
                raise
        with self._phase("snapshot"):
            begin = time.perf_counter()
            send_command(self._learner.ranks, Snapshot())
            sums = self._snapshots.write(slot, self._publisher.place, self._publisher.wrote)
            self._publisher.publish_soon(self.version, time.perf_counter() - begin, sums)
        return True

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`, and write it as a span."""
        with self._context.metrics.span(name), self._learner.phases(name):
            yield

    def _keep_going(self) -> bool:
        self._session.progress(f"training step {self.version + 1}")
        return not self._session.stopping.is_set()

    def _lease(self) -> TrainBatch | None:
        """Lease the next batch; None when asked to stop.

        Raises:
            DeadlineError: none came within `RunConfig.batch_wait_s`, while the run was not paused;
                or another rank is silent.
            PeerLostError: what was published last is lost, so that none may ever come.
            BatchError: it has samples that cannot be trained on.
        """
        step, facts = self.version + 1, self._facts
        deadline = Deadline(self._config.batch_wait_s, f"no batch for step {step}")
        while not self._session.stopping.is_set():
            if self._saver.under_way:
                send_command(self._learner.ranks, Save("settled"))
            self._saved(self._saver.settled())
            self._learner.ranks.check()
            self._publisher.check()
            self._session.progress(f"waiting for batch {step}", 0)
            ask = LeaseBatch(step=step, wait_s=LEASE_SLICE_S)
            limit = LEASE_SLICE_S + self._grace_s
            try:
                lease = self._session.data.call(
                    ask, BatchLease, timeout_s=limit, stopping=self._session.stopping
                )
            except DeadlineError:
                if self._session.stopping.is_set():
                    return None
                raise
            self._sinks.write_evals(lease.evals)
            if lease.checkpoint:
                self._save_on_request()
            if lease.trajectories:
                return make_batch(lease.scored(), facts.vocabulary, facts.tokens, facts.routers)
            if lease.paused:
                deadline.restart()
            awaited = lease.waiting_for or "trajectories"
            deadline.check(f": waiting for {awaited}")
        return None

    def _commit(self, row: Row) -> bool:
        """Tell the buffer that the batch is trained on; from here on the version is one higher.

        False when asked to stop and the buffer does not answer any more: it ends too.
        """
        step = self.version + 1
        metrics = {name: value for name, value in row.items() if value is not None}
        try:
            ack = self._session.data.call(
                CommitBatch(step=step, metrics=metrics),
                CommitAck,
                timeout_s=self._grace_s,
                stopping=self._session.stopping,
            )
        except DeadlineError:
            if self._session.stopping.is_set():
                return False
            raise
        if ack.version != step:
            raise UmbraError(f"the buffer is at version {ack.version} after the commit of {step}")
        self.version = step
        return True

    def _judge(self, row: Row) -> None:
        """Say that an update was left out; end all ranks if that was one too many."""
        try:
            best = self._config.checkpoint.best_metric.removeprefix("-")
            if best and best not in row:
                raise UsageError(
                    f"checkpoint.best_metric: {best!r} is not measured; there is "
                    f"{', '.join(sorted(row))}"
                )
            why = self._patience.see(row, self.version)
        except (DivergedError, UsageError) as error:
            send_command(self._learner.ranks, Stop(str(error)))
            raise
        if why:
            self._context.log.warning(
                "step %d: an update was left out, because %s", self.version, why
            )

    def _save_on_request(self) -> None:
        """An operator wants the state saved; the buffer says so until it hears that it was.

        Before the first step of this process there is nothing to save that is not there already.
        """
        row = self._row
        with self._phase("checkpoint"):
            if row is not None:
                send_command(self._learner.ranks, Save("wanted", self.version))
            if row is None or not self._saver.wanted(self.version, row):
                self._tell_covered()

    def _saved(self, outcomes: list[SaveOutcome]) -> None:
        """Report what came of checkpoints, and have the buffer let go of what they cover."""
        for outcome in outcomes:
            self._context.metrics.write("checkpoint", **asdict(outcome))
            self._session.emit("checkpoint", **asdict(outcome))
            if outcome.error:
                steps = self._saver.folder.steps()
                self._context.log.warning(
                    "the checkpoint of step %d was not saved: %s; %s; training goes on",
                    outcome.step,
                    outcome.error,
                    f"the newest is that of step {steps[-1]}" if steps else "there is none yet",
                )
            else:
                self._context.log.info(
                    "checkpoint of step %d: %s, training waited %.3f s, written after %.2f s",
                    outcome.step,
                    size(outcome.size),
                    outcome.copy_s,
                    outcome.write_s,
                )
            if not self._session.stopping.is_set():
                self._tell_covered(outcome.error)

    def _tell_covered(self, error: str = "") -> None:
        folder = self._saver.folder
        newest = max(folder.steps(), default=-1)
        covered = CheckpointSaved(step=folder.covered, newest=newest, error=error)
        self._session.data.call(covered, Ok, timeout_s=self._grace_s)

    def _report(self, row: Row) -> None:
        seconds = self._learner.phases.take()
        learner = self._learner
        work = row.pop("operations", None) or 0.0
        row |= speed_metrics(row["tokens"] or 0.0, work, seconds["train_step"], learner.ceiling)
        row["memory/peak_gib"] = peak_memory_gib(learner.device)
        row |= {f"seconds/{name}": spent for name, spent in seconds.items()}
        self._context.metrics.write("step", step=self.version, **row)
        self._session.emit("step", step=self.version, **row)
        self._sinks.write(self.version, row)
        shown = {name: row.get(key) for name, key in SHOWN.items()}
        self._session.stats(step=self.version, **{k: v for k, v in shown.items() if v is not None})
        self._context.log.info(
            "step %d: reward %.3f, staleness %.2f, ess %s, waited %.2f s, trained %.2f s",
            self.version,
            row["reward/mean"],
            row["staleness/total/mean"],
            "-" if (ess := row.get("ess")) is None else f"{ess:.3f}",
            seconds["wait_batch"],
            seconds["train_step"],
        )
