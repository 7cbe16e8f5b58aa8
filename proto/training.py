"""Messages of the data socket between the trainer and the buffer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from umbra.proto.base import Message
from umbra.proto.bounds import BATCH, RUN, STAGES, Figures, Id, Number, Text
from umbra.proto.errors import WireError
from umbra.proto.records import EvalReport, Ledger, Score, Trajectory, with_score


class LeaseBatch(Message, frozen=True, kw_only=True):
    """The trainer asks for the batch of optimizer step `step` (1-based), waiting up to `wait_s`."""

    step: int
    wait_s: Number


class BatchLease(Message, frozen=True, kw_only=True):
    """The batch, whole groups in order; empty when it could not be filled within `wait_s`.

    `waiting_for` says in words what is missing.
    """

    step: int
    trajectories: Annotated[list[Trajectory], Meta(max_length=RUN)]
    waiting_for: Text = ""
    paused: bool = False  # it is not late: the run was paused
    checkpoint: bool = False  # save the state of now before anything else
    evals: Annotated[
        list[EvalReport], Meta(max_length=BATCH)
    ] = []  # the last ones that are over, for the trainer's curves
    scores: Annotated[
        dict[Id, Annotated[list[Score], Meta(max_length=RUN)]], Meta(max_length=STAGES)
    ] = {}  # by stage in their order: what it found, for each of `trajectories`

    def scored(self) -> list[Trajectory]:
        """`trajectories` with what all stages have found.

        Raises:
            WireError: the scores are not those of the trajectories.
        """
        made = self.trajectories
        for stage, scores in self.scores.items():
            if [score.sample_id for score in scores] != [one.sample_id for one in made]:
                raise WireError(f"the scores of stage {stage} are of other samples", path="scores")
            made = [with_score(one, stage, score) for one, score in zip(made, scores, strict=True)]
        return made


class CommitBatch(Message, frozen=True, kw_only=True):
    """The batch of `step` has been trained on. A repeated commit is a no-op."""

    step: int
    metrics: Figures = {}


class CommitAck(Message, frozen=True, kw_only=True):
    """Committed; the ledger after it."""

    version: int
    ledger: Ledger


class CheckpointSaved(Message, frozen=True, kw_only=True):
    """The trainer can start again after `step`: batches up to it need not be kept any more."""

    step: int
    newest: int = -1  # step of the newest checkpoint, on which the trainer need not rely alone
    error: Text = ""  # why the last one that was tried is not there


class FinishRun(Message, frozen=True, kw_only=True):
    """The trainer is done: what is in flight ends as `cancelled`, everyone drains."""

    reason: Text


class RunFinished(Message, frozen=True, kw_only=True):
    """The final ledger; nothing is in flight any more."""

    ledger: Ledger
    evals: Annotated[list[EvalReport], Meta(max_length=BATCH)] = []  # the last ones that are over
