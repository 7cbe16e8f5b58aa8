"""The trainer's side of the broker: questions for a batch, commits, checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from umbra.proto import messages as m
from umbra.proto.bounds import LEASES
from umbra.proto.codec import portions
from umbra.proto.net.server import Request
from umbra.services.buffer.effects import NackError, departed
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
        self._run = run
        self._batches = run.batches
        self._missing = missing
        # The parked request, its step, and when its wait is over.
        self._question: tuple[Request, int, float] | None = None

    def lease(self, request: Request, body: m.LeaseBatch, now: float) -> None:
        """Lease the batch of the next step, the same as before if asked again; or park the request.

        A restarted trainer may ask for an earlier step: it resumes after its last checkpoint, and
        gets the batches of the steps since then again.
        """
        self._answer_parked("asked again")
        run, batches = self._run, self._batches
        is_new = request.header.incarnation != run.committer
        if is_new and 0 < body.step <= batches.version and batches.can_rewind(body.step):
            self._rewind(request.header.sender, body.step, now)
        expected, steps = batches.next_step, run.config.run.steps
        if body.step != expected or body.step > steps:
            reason = f"step {body.step} cannot be leased: {batches.version} of {steps} "
            reason += "steps are committed"
            if expected <= steps:
                reason += f", so the next is {expected}"
            raise NackError("wrong_step", reason, "step")
        self._question = request, body.step, now + body.wait_s
        if self.closed:
            self._answer_parked("nothing: the run is ending")
            return
        if run.wanted_since is None:
            run.wanted_since = now
        self.serve(now)
        self.expire(now)

    def commit(self, request: Request, body: m.CommitBatch, now: float) -> None:
        run, leased = self._run, self._batches.leased
        if leased is not None and leased.step == body.step:
            self._batches.commit()
            run.committer = request.header.incarnation
            run.curves.add(body.step, body.metrics, now)
            run.counters["mixed_version"] += leased.staleness.mixed
            run.health.trained(len(leased.samples))
            if body.metrics.get("skipped") == 1.0:
                run.counters["batches_skipped"] += 1
        elif 1 <= body.step <= self._batches.version:
            run.counters["repeated_commits"] += 1
        else:
            reason = f"step {body.step} cannot be committed: its batch was not leased, version is "
            raise NackError("not_leased", f"{reason}{self._batches.version}", "step")
        ledger = run.pool.ledger.snapshot()
        run.outbox.reply(request, m.CommitAck(version=self._batches.version, ledger=ledger))

    def checkpoint(self, request: Request, body: m.CheckpointSaved) -> None:
        version = self._batches.version
        if not 0 <= body.step <= version:
            reason = f"no checkpoint can cover step {body.step}: {version} steps are committed"
            raise NackError("wrong_step", reason, "step")
        self._batches.cover(body.step)
        self._run.outbox.reply(request, m.Ok())

    def serve(self, now: float) -> None:
        question, run = self._question, self._run
        if question is None:
            return
        is_new = self._batches.leased is None
        if is_new and run.evals.pausing:
            return
        batch = self._batches.form(now)
        if batch is None:
            return
        if is_new:
            if run.buffer.on_batch == "interrupt":
                interrupt(run, "the batch is full")
            run.outbox.measure(
                "batch",
                step=batch.step,
                groups=len(batch.groups),
                samples=len(batch.samples),
                tokens=sum(sample.tokens for sample in batch.samples),
                wait_s=0.0 if run.wanted_since is None else now - run.wanted_since,
                in_flight=run.pool.ledger.snapshot().in_flight,
                **{f"staleness_{name}": value for name, value in batch.staleness.figures().items()},
            )
        self._question = run.wanted_since = None
        trajectories, scores, digest = run.pool.journal.batch(batch.samples)
        # Shows, also when it is handed out again, that step and bytes belong together.
        run.outbox.measure("handed_out", step=batch.step, digest=digest)
        self._reply(question[0], batch.step, trajectories, scores=scores)

    def expire(self, now: float) -> None:
        if self._question is not None and self._question[2] <= now:
            self._answer_parked(self._missing(now))

    def forget(self) -> None:
        """Refuse the parked request; the batch stays leased for the next trainer."""
        if self._question is not None:
            request = self._question[0]
            self._run.outbox.refuse(request, departed(request.header.sender))
        self._question = self._run.wanted_since = None

    def close(self) -> None:
        self.closed = True
        self._answer_parked("nothing: the run is ending")
        self._run.wanted_since = None

    def _rewind(self, trainer: str, step: int, now: float) -> None:
        lost = self._batches.version - step + 1
        text = "%s starts again at step %d: the batches of the last %d steps are handed out again"
        log.warning(text, trainer, step, lost)
        self._run.counters["steps_repeated"] += lost
        self._batches.rewind(step, now)
        self._run.curves.cut(step)

    def _answer_parked(self, waiting_for: str) -> None:
        if self._question is None:
            return
        (request, step, _), self._question = self._question, None
        run, batches = self._run, self._batches
        is_full = run.pool.journal.store.size_bytes >= run.buffer.store_max_bytes
        makes_room = is_full and batches.checkpoint is not None and bool(batches.kept)
        self._reply(request, step, [], makes_room, waiting_for=waiting_for)

    def _reply(
        self, request: Request, step: int, made: list[Any], save: bool = False, **said: Any
    ) -> None:
        """Answer with the trajectories `made`, or that the trainer is to `save` its state."""
        evals = self._run.evals.newest
        lease = m.BatchLease(step=step, trajectories=made, checkpoint=save, evals=evals, **said)
        self._run.outbox.reply(request, lease)
