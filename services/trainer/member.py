"""Rank 0 as a member of the run: it leases and commits batches, and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import msgspec
from transformers import PreTrainedTokenizerBase

from umbra.proto.errors import DeadlineError, RejectedError, UmbraError, UsageError
from umbra.proto.messages import (
    BatchLease,
    CheckpointSaved,
    CommitAck,
    CommitBatch,
    FinishRun,
    LeaseBatch,
    Message,
    Ok,
    RunFinished,
)
from umbra.proto.net.session import Session
from umbra.proto.records import Manifest, Trajectory
from umbra.services.process.command import ServiceContext
from umbra.services.reporting import size
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.checkpoints.folder import CheckpointFolder
from umbra.services.trainer.checkpoints.saver import SaveOutcome
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row, peak_memory_gib
from umbra.services.trainer.rollout_log import RolloutLog
from umbra.services.trainer.sinks import Sinks, open_sinks
from umbra.services.weights.publisher import Publisher

HUB_DEADLINE_S = 60.0  # a hub starts within seconds; the rest is for slow machines
LEASE_SLICE_S = 1.0  # how long one request for a batch is parked, so that a stop is noticed
TELL_S = 600.0  # between two lines in the log about what a batch waits for
# Metrics of a step that the monitor shows.
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
T = TypeVar("T")
M = TypeVar("M", bound=Message)


class NextStep(msgspec.Struct, frozen=True):
    """The next action of all ranks, by the buffer's answer to rank 0; they wait if none is set."""

    trajectories: list[Trajectory] = []  # a batch to train on
    save: bool = False  # the buffer's store is full until there is a checkpoint
    stop: bool = False  # leave the run


@dataclass(eq=False)
class RunMember:
    """The session of rank 0, and what it reports to."""

    context: ServiceContext
    session: Session
    learner: Learner
    publisher: Publisher
    folder: CheckpointFolder
    sinks: Sinks
    rollouts: RolloutLog
    reported_at: float = field(default_factory=time.monotonic)  # a batch, or that it is late
    compared: float | None = None  # tokens of generators and trainer in all steps; None without

    @property
    def stopping(self) -> bool:
        return self.session.stopping.is_set()

    def keep_going(self, step: int) -> bool:
        self.session.progress(f"training step {step}")
        return not self.stopping

    def turn(self, step: int) -> NextStep:
        """Ask the buffer for the batch of `step`, for a second at most.

        Raises:
            PeerLostError: the last published version is lost, so that no batch may ever come.
        """
        if self.stopping:
            return NextStep(stop=True)
        self.publisher.check()
        self.session.progress(f"waiting for batch {step}", 0)
        ask = LeaseBatch(step=step, wait_s=LEASE_SLICE_S)
        lease = self._call(ask, BatchLease, LEASE_SLICE_S)
        if lease is None:
            return NextStep(stop=True)
        self.sinks.write_evals(lease.evals)
        if lease.checkpoint and self.folder.steps()[-1:] == [step - 1]:
            self._tell_covered(step - 1)  # no newer one can be made: older ones give up theirs
        now = time.monotonic()
        if lease.trajectories:
            self.reported_at = now
        elif now - self.reported_at > TELL_S:
            self.reported_at = now
            missing = lease.waiting_for or "trajectories"
            self.context.log.warning("no batch for step %d yet: waiting for %s", step, missing)
        return NextStep(lease.scored(), save=lease.checkpoint)

    def commit(self, step: int, row: Row) -> bool:
        """Tell the buffer that the batch of `step` is trained on; False as `_answered`'s None."""
        metrics = {name: value for name, value in row.items() if value is not None}
        ack = self._call(CommitBatch(step=step, metrics=metrics), CommitAck)
        if ack is not None and ack.version != step:
            raise UmbraError(f"the buffer is at version {ack.version} after the commit of {step}")
        return ack is not None

    def slot(self, version: int) -> memoryview | None:
        """Return memory for a version, None when asked to stop; DeadlineError without a slot."""
        self.session.progress(f"snapshot of version {version}")
        pace = self.context.config.weight_hub.pace
        limit_s = pace.limit_s(self.publisher.manifest.total_bytes)
        return self._answered(lambda: self.publisher.slot(version, 2 * limit_s))

    def publish(self, version: int, snapshot_s: float, sums: list[int]) -> None:
        """Publish the slot; nothing if the hub has ended, and this process is to stop as well."""
        self._answered(lambda: self.publisher.publish(version, snapshot_s, sums))

    def _call(self, ask: Message, kind: type[M], wait_s: float = 0.0) -> M | None:
        """Ask the buffer, which may be away for as long as `run.broker_grace_s`."""
        data, stopping = self.session.data, self.session.stopping.is_set
        timeout_s = wait_s + self.context.config.run.broker_grace_s
        return self._answered(lambda: data.call(ask, kind, timeout_s=timeout_s, stopping=stopping))

    def _answered(self, ask: Callable[[], T]) -> T | None:
        """Return the answer; None if there is none and this process is to stop: its peer is too."""
        try:
            return ask()
        except DeadlineError:
            if self.stopping:
                return None
            raise

    def resume(self, step: int) -> None:
        """Tell the buffer which steps need not be repeated, by the checkpoint of `step`.

        Raises:
            UsageError: the checkpoint of `step` is not of the buffer's run.
        """
        try:
            self._tell_covered(self.folder.covered)
        except RejectedError as error:
            raise UsageError(
                f"{self.folder.of(step)} does not belong to the buffer's run ({error}): give "
                "the buffer the store of that run, or begin another run"
            ) from error
        self.context.log.info("going on from the checkpoint of step %d", step)

    def _tell_covered(self, step: int) -> None:
        """Have the buffer drop batches up to `step`, which checkpoints cover."""
        covered = CheckpointSaved(step=step)
        grace_s = self.context.config.run.broker_grace_s
        self.session.data.call(covered, Ok, timeout_s=grace_s)

    def saved(self, outcomes: list[SaveOutcome]) -> None:
        """Report checkpoints to the metrics, the monitor, the log and the buffer."""
        log = self.context.log
        for outcome in outcomes:
            self._publish("checkpoint", asdict(outcome))
            if outcome.error:
                steps = self.folder.steps()
                text = f"the newest is that of step {steps[-1]}" if steps else "there is none yet"
                log.warning(
                    "the checkpoint of step %d was not saved: %s; %s; training goes on",
                    *(outcome.step, outcome.error, text),
                )
            else:
                log.info(
                    "checkpoint of step %d: %s, training waited %.3f s, written after %.2f s",
                    *(outcome.step, size(outcome.size), outcome.copy_s, outcome.write_s),
                )
            if not self.stopping:
                self._tell_covered(self.folder.covered)

    def report(self, step: int, row: Row, seconds: dict[str, float], batch: TrainBatch) -> None:
        """Report a step: to the metrics, the monitor, the curves and the log."""
        train_s = seconds["train_step"]
        row = row | {f"seconds/{name}": spent for name, spent in seconds.items()}
        row["train_tokens_per_s"] = (row["tokens"] or 0.0) / train_s
        row["samples_per_s"] = (row["samples"] or 0.0) / max(seconds["step"], 1e-9)
        row["memory/peak_gib"] = peak_memory_gib(self.learner.device)
        self._publish("step", {"step": step, **row})
        self.compared = (self.compared or 0.0) + (row["mismatch/compared"] or 0.0)
        self.sinks.write(step, row)
        figures = {name: row.get(key) for name, key in SHOWN.items()}
        self.session.stats(step=step, **{k: v for k, v in figures.items() if v is not None})
        ess = "-" if figures["ess"] is None else f"{figures['ess']:.3f}"
        self.context.log.info(
            "step %d: reward %.3f, staleness %.2f, ess %s, waited %.2f s, trained %.2f s",
            *(step, row["reward/mean"], row["staleness/total/mean"], ess),
            *(seconds["wait_batch"], train_s),
        )
        self.rollouts.step(step, batch.samples)

    def _publish(self, event: str, values: dict[str, Any]) -> None:
        self.context.metrics.write(event, **values)
        self.session.emit(event, **values)

    def finish(self) -> bool:
        """End the run after the evaluation that is under way; False if asked to stop before."""
        config, log = self.context.config.eval, self.context.log
        evaluation_s = config.timeout_s if config.prompts else 0.0
        end = self._call(FinishRun(reason="steps reached"), RunFinished, evaluation_s)
        if end is None:
            return False
        self.sinks.write_evals(end.evals)
        log.info("%d samples trained of %d issued", end.ledger.trained, end.ledger.issued)
        if self.compared == 0:
            log.warning(
                "generators and trainer were not compared since it started: no response was "
                "sampled by weights that the trainer had or kept"
            )
        return True


@contextmanager
def join_run(
    context: ServiceContext,
    learner: Learner,
    manifest: Manifest,
    tokenizer: PreTrainedTokenizerBase,
    folder: CheckpointFolder,
    step: int,
) -> Iterator[RunMember]:
    """Join the run as rank 0, which is at `step`; leave it after the block."""
    config, run_dir = context.config, context.run_dir
    assert run_dir is not None
    vocabulary, routers = learner.model.config.vocab_size, learner.replayed
    with context.join(vocabulary=vocabulary, routers=routers) as session:
        hub, pace = session.weights(deadline_s=HUB_DEADLINE_S), config.weight_hub.pace
        publish = lambda row: session.emit("rollout", **row)  # noqa: E731
        with (
            closing(Publisher(hub, manifest, session.stopping, pace)) as publisher,
            open_sinks(config, run_dir, step) as sinks,
            closing(RolloutLog(run_dir, tokenizer, config.log.samples, publish)) as rollouts,
        ):
            publisher.register(pace.limit_s(config.weight_hub.slots * manifest.total_bytes))
            yield RunMember(context, session, learner, publisher, folder, sinks, rollouts)
