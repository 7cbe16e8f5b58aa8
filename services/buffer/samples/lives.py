"""The lives of traced groups, as the buffer sees them: a row for each stage that is over.

The stages of a sample are the states that the ledger counts, `scoring` with the name of what
scores. A life ends when all samples of the group are over; one that is trained on again begins no
second one. After a restart of the buffer lives begin with the restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from umbra.services.buffer.effects import Effects
from umbra.services.buffer.samples.groups import Group, Sample
from umbra.services.process.lives import is_traced


@dataclass(slots=True)
class _Life:
    """Of a sample in flight: since when it lives, and is in its stage."""

    begun: float
    stage: str
    since: float


class Lives:
    """Told of all moves of samples; leaves rows of the traced ones.

    Args:
        share: of all groups, that are traced.
        outbox: takes the rows.
    """

    def __init__(self, share: float, outbox: Effects) -> None:
        self.now = 0.0  # of the event that is handled, seconds of the broker's clock
        self._share = share
        self._outbox = outbox
        self._samples: dict[str, _Life] = {}
        self._groups: dict[str, set[str]] = {}  # their samples in flight
        self._begun: dict[str, float] = {}  # by group

    def issued(self, group: Group) -> None:
        """The samples of `group` are queued."""
        if not is_traced(group.group_id, self._share):
            return
        self._begun[group.group_id] = self.now
        self._groups[group.group_id] = {sample.sample_id for sample in group.samples}
        for sample in group.samples:
            self._samples[sample.sample_id] = _Life(self.now, "queued", self.now)

    def moved(self, sample: Sample, stage: str) -> None:
        """`sample` is in another stage now."""
        life = self._samples.get(sample.sample_id)
        if life is not None:
            self._row(sample.group, life.stage, life.since, sample, attempt=sample.attempt)
            life.stage, life.since = stage, self.now

    def over(self, sample: Sample, outcome: str, step: int = 0) -> None:
        """`sample` was trained on in `step`, or has ended."""
        life = self._samples.pop(sample.sample_id, None)
        if life is None:
            return
        group = sample.group
        self._row(group, life.stage, life.since, sample, attempt=sample.attempt)
        self._row(
            group, "sample", life.begun, sample,
            outcome=outcome, attempt=sample.attempt, tokens=sample.tokens, reward=sample.reward,
            oldest=-1 if sample.oldest is None else sample.oldest, newest=sample.newest,
        )  # fmt: skip
        left = self._groups[group.group_id]
        left.discard(sample.sample_id)
        if not left:
            del self._groups[group.group_id]
            begun = self._begun.pop(group.group_id)
            prompt = group.prompt.prompt_id
            self._row(group, "group", begun, outcome=outcome, step=step, prompt=prompt)

    def _row(
        self, group: Group, stage: str, start: float, sample: Sample | None = None, **facts: object
    ) -> None:
        name = sample.sample_id if sample else ""
        self._outbox.lived(start, self.now, group=group.group_id, sample=name, stage=stage, **facts)
