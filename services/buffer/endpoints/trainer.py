"""The trainer's side of the broker: questions for a batch, commits, checkpoints."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from umbra.proto import messages as m
from umbra.proto.bounds import LEASES
from umbra.proto.codec import portions
from umbra.proto.net.server import Request
from umbra.services.buffer.effects import Effects, NackError, Parked
from umbra.services.buffer.samples.groups import State
from umbra.services.buffer.state import RunState

log = logging.getLogger(__name__)


def interrupt(run: RunState, reason: str) -> None:
    """Ask generators to hand back all samples; a push that is lost costs only the time saved."""
    for holder, held in run.leases.held.items():
        leases = [
            (sample.sample_id, sample.attempt)
            for sample in held.values()
            if sample.state is State.GENERATING and sample.sample_id in run.pool.samples
        ]
        run.counters["interrupted"] += len(leases)
        if leases and holder in run.members.peers:
            for portion in portions(leases, lambda _: 0, LEASES):
                order = m.Interrupt(leases=portion, reason=reason)
                run.outbox.push(run.members.peers[holder].identity, order, "data")


class TrainerEndpoint:
    """The trainer's endpoint. A request for a batch that is not full is parked, one at a time.

    Args:
        missing: returns in words what the batch waits for, at a time.
    """

    def __init__(self, run: RunState, *, missing: Callable[[float], str]) -> None:
        self.closed = False
        self.checkpoint_requests = CheckpointRequests(run.outbox)
        self._run = run
        self._pool = run.pool
        self._batches = run.batches
        self._counters = run.counters
        self._outbox = run.outbox
        self._steps = run.config.run.steps
        self._missing = missing
        self._question: Parked[m.LeaseBatch] | None = None

    def lease(self, request: Request, body: m.LeaseBatch, now: float) -> None:
        """Lease the batch of the next step, the same as before if asked again; or park the request.

        A restarted trainer may ask for an earlier step: it resumes after its last checkpoint, and
        gets the batches of the steps since then again.
        """
        self._answer_parked("asked again")
        is_new = request.header.incarnation != self._run.committer
        if is_new and 0 < body.step <= self._batches.version:
            if self._batches.can_rewind(body.step):
                self._rewind(request.header.sender, body.step, now)
        expected = self._batches.next_step
        if body.step != expected or body.step > self._steps:
            reason = (
                f"step {body.step} cannot be leased: {self._batches.version} of {self._steps} "
                "steps are committed"
            )
            if expected <= self._steps:
                reason += f", so the next is {expected}"
            raise NackError("wrong_step", reason, "step")
        if self.closed:
            self._outbox.reply(request, self._nothing(body.step, "nothing: the run is ending"))
            return
        if self._run.wanted_since is None:
            self._run.wanted_since = now
        self._question = Parked(request, body, now + body.wait_s)
        self.serve(now)
        self.expire(now)

    def commit(self, request: Request, body: m.CommitBatch, now: float) -> None:
        leased = self._batches.leased
        if leased is not None and leased.step == body.step:
            batch = self._batches.commit()
            self._run.committer = request.header.incarnation
            self._run.curves.add(body.step, body.metrics, now)
            self._counters["mixed_version"] += batch.staleness.mixed
            tokens = [sample.tokens for group in batch.groups for sample in group.samples]
            self._run.health.trained(body.step, body.metrics, tokens)
            if body.metrics.get("skipped") == 1.0:
                self._counters["batches_skipped"] += 1
        elif 1 <= body.step <= self._batches.version:
            self._counters["repeated_commits"] += 1
        else:
            reason = (
                f"step {body.step} cannot be committed: its batch was not leased, version is "
                f"{self._batches.version}"
            )
            raise NackError("not_leased", reason, "step")
        ledger = self._pool.ledger.snapshot()
        self._outbox.reply(request, m.CommitAck(version=self._batches.version, ledger=ledger))

    def checkpoint(self, request: Request, body: m.CheckpointSaved, _now: float) -> None:
        version = self._batches.version
        if not 0 <= body.step <= version:
            reason = f"no checkpoint can cover step {body.step}: {version} steps are committed"
            raise NackError("wrong_step", reason, "step")
        self._batches.cover(body.step)
        self._outbox.reply(request, m.Ok())
        self.checkpoint_requests.saved(body.newest, body.error)

    def checkpoint_wanted(self, request: Request, now: float) -> None:
        """Ask the trainer for a checkpoint, at once if it is waiting for a batch."""
        self.checkpoint_requests.add(request, self._batches.version, now)
        if self.checkpoint_requests.open:
            self._answer_parked("a checkpoint is wanted first")

    def serve(self, now: float) -> None:
        question = self._question
        if question is None or self._run.paused:
            return
        is_new = self._batches.leased is None
        if is_new and self._run.evals.pausing:
            return
        batch = self._batches.form(now)
        if batch is None:
            return
        if is_new:
            if self._run.buffer.on_batch == "interrupt":
                interrupt(self._run, "the batch is full")
            self._outbox.measure(
                "batch",
                step=batch.step,
                groups=len(batch.groups),
                samples=batch.staleness.samples,
                tokens=sum(sample.tokens for group in batch.groups for sample in group.samples),
                wait_s=0.0 if self._run.wanted_since is None else now - self._run.wanted_since,
                in_flight=self._pool.ledger.snapshot().in_flight,
                **{f"staleness_{name}": value for name, value in batch.staleness.figures().items()},
            )
        self._question = self._run.wanted_since = None
        packed = self._pool.trajectory_store.batch(batch.sample_ids)
        # Shows, also when it is handed out again, that step and bytes belong together.
        self._outbox.measure("handed_out", step=batch.step, digest=packed.digest)
        lease = m.BatchLease(
            step=batch.step,
            trajectories=packed.trajectories,
            scores=packed.scores,
            checkpoint=self.checkpoint_requests.open,
            evals=self._run.evals.newest,
        )
        self._outbox.reply(question.request, lease)

    def expire(self, now: float) -> None:
        if self._question is not None and self._question.deadline <= now:
            self._answer_parked(self._missing(now))
        why = f"the trainer has made no checkpoint within {WAIT_S:g} s: see its log"
        self.checkpoint_requests.give_up(why, until=now)

    def forget(self) -> None:
        """Refuse the parked request; the batch stays leased for the next trainer."""
        if self._question is not None:
            self._outbox.refuse_departed(self._question.request)
        self._question = self._run.wanted_since = None

    def close(self) -> None:
        self.closed = True
        self._answer_parked("nothing: the run is ending")
        self.checkpoint_requests.give_up("the run is ending")
        self._run.wanted_since = None

    def _rewind(self, trainer: str, step: int, now: float) -> None:
        lost = self._batches.version - step + 1
        log.warning(
            "%s starts again at step %d: the batches of the last %d steps are handed out again",
            trainer, step, lost,
        )  # fmt: skip
        self._counters["steps_repeated"] += lost
        self._batches.rewind(step, now)
        self._run.curves.cut(step)
        self.checkpoint_requests.forget_after(step - 1)

    def _answer_parked(self, waiting_for: str) -> None:
        if self._question is not None:
            question, self._question = self._question, None
            self._outbox.reply(question.request, self._nothing(question.body.step, waiting_for))

    def _nothing(self, step: int, waiting_for: str) -> m.BatchLease:
        holds_batches = self._batches.checkpoint is not None and bool(self._batches.archive.steps)
        is_full = self._run.journal.store.size_bytes >= self._run.buffer.store_max_bytes
        wanted = self.checkpoint_requests.open or (holds_batches and is_full)  # one makes room
        return m.BatchLease(
            step=step,
            trajectories=[],
            waiting_for=waiting_for,
            paused=bool(self._run.paused),
            checkpoint=wanted,
            evals=self._run.evals.newest,
        )


WAIT_S = 3600.0  # writing a large model takes its time


class CheckpointRequests:
    """Requests for checkpoints; every `BatchLease` carries them until the trainer saves."""

    def __init__(self, outbox: Effects) -> None:
        self._newest = -1  # step of the newest checkpoint that we know of
        self._outbox = outbox
        # Each waits for a checkpoint of its version or a later one, until a deadline.
        self._waiting: list[tuple[Request, int, float]] = []

    @property
    def open(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Request, version: int, now: float) -> None:
        self._waiting.append((request, version, now + WAIT_S))
        self.saved(self._newest)

    def saved(self, newest: int, error: str = "") -> None:
        """Answer with the checkpoint that the trainer saved, or its error."""
        self._newest = newest = max(self._newest, newest)
        for request, version, _ in self._waiting:
            if version <= newest:
                self._outbox.reply(request, m.Ok(version=newest))
        self._waiting = [entry for entry in self._waiting if entry[1] > newest]
        if error:
            self.give_up(f"the trainer could not save its state: {error}")

    def forget_after(self, step: int) -> None:
        """Forget checkpoints after `step`: the trainer has resumed there."""
        self._newest = min(self._newest, step)

    def give_up(self, reason: str, until: float = math.inf) -> None:
        for request, _, deadline in self._waiting:
            if deadline <= until:
                self._outbox.refuse(request, "no_checkpoint", reason)
        self._waiting = [entry for entry in self._waiting if entry[2] > until]
