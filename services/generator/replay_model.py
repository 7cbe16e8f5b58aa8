"""How fast an engine decodes, and how long answers get: a model of it that needs no model.

No clock, no IO: times are arguments, so that a generator and a simulator can run the same code.
The file that holds a `ReplayModel` is described in docs/generation.md.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from umbra.proto.errors import UNREADABLE, UsageError

_Seconds = Annotated[float, Meta(ge=0)]


class ReplayModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speed and lengths of an engine.

    A decode step over n sequences that also reads p prompt tokens takes
    `step_s + token_s * n + prompt_token_s * p` seconds; new weights stop it for `pause_s`.
    `lengths` are evenly spaced quantiles, from the least to the largest, of the tokens of a turn.
    """

    step_s: Annotated[float, Meta(gt=0)]
    token_s: _Seconds = 0.0
    prompt_token_s: _Seconds = 0.0
    pause_s: _Seconds = 0.0
    lengths: Annotated[list[Annotated[float, Meta(ge=1)]], Meta(min_length=1)]
    source: str = ""  # the run that it was fitted to
    error: float | None = None  # relative error of the time of a part of it that was left out

    def length(self, share: float) -> int:
        """The length that `share` (0 to 1) of the turns stay below, interpolated."""
        at = share * (len(self.lengths) - 1)
        low = min(int(at), len(self.lengths) - 1)
        least, most = self.lengths[low], self.lengths[min(low + 1, len(self.lengths) - 1)]
        return round(least + (at - low) * (most - least))


def read_replay_model(path: str | Path) -> ReplayModel:
    """The model in the JSON file at `path`.

    Raises:
        UsageError: no such file, or not a replay model; it names the field.
    """
    if not str(path):
        raise UsageError(
            'generator.engine = "replay" needs generator.replay = FILE: make one of a measured run '
            "with `umbra replay-model RUN --out FILE`"
        )
    try:
        model = msgspec.json.decode(Path(path).read_bytes(), type=ReplayModel)
    except OSError as error:
        raise UsageError(f"generator.replay: {path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise UsageError(f"generator.replay: {path} is no replay model: {error}") from error
    if model.lengths != sorted(model.lengths):
        raise UsageError(f"generator.replay: the lengths in {path} are quantiles and must not fall")
    return model


@dataclass(slots=True)
class _MetricsRow:
    name: str
    prompt_tokens: int
    new_tokens: int
    at: float  # when it was submitted
    first_step: int = 0  # that gave it a token


class ReplayDecoder:
    """What an engine with `slots` slots has decoded by when, under a `ReplayModel`.

    Between two events (a request comes, one ends) all steps are alike, so it leaps from one to the
    next: the cost does not depend on the number of tokens.
    """

    def __init__(self, model: ReplayModel, slots: int) -> None:
        self.tokens = 0
        self._model = model
        self._slots = slots
        self._at = 0.0  # the start of the next step, or of the one under way
        self._debt = 0.0  # seconds by which that step is longer: prompts that it reads, pauses
        self._step = 0
        self._live: dict[str, _MetricsRow] = {}
        # A heap: the step that ends a row, a number that no two have, the row.
        self._ends: list[tuple[int, int, _MetricsRow]] = []
        self._begun = 0
        self._queue: deque[_MetricsRow] = deque()

    @property
    def live(self) -> int:
        """Rows that are decoded."""
        return len(self._live)

    @property
    def queued(self) -> int:
        """Rows that wait for a slot."""
        return len(self._queue)

    def submit(self, name: str, prompt_tokens: int, new_tokens: int, now: float) -> None:
        """A request of these sizes came at `now`; it begins with the next step."""
        self._queue.append(_MetricsRow(name, prompt_tokens, new_tokens, now))

    def advance(self, now: float) -> list[str]:
        """Decode until `now`; the names that were finished, in order."""
        finished: list[str] = []
        while self._begin_step():
            if (steps := self._steps_until(now)) < 1:
                break
            self._leap(steps)
            while self._ends and self._ends[0][0] <= self._step:
                *_, row = heapq.heappop(self._ends)
                if self._live.get(row.name) is row:  # else it was removed
                    del self._live[row.name]
                    finished.append(row.name)
        return finished

    def next_at(self) -> float | None:
        """When the next row ends if nothing else comes; None if there is nothing to do."""
        if not self._begin_step():
            return None
        while self._ends[0][2] is not self._live.get(self._ends[0][2].name):
            heapq.heappop(self._ends)
        return self._at + self._debt + (self._ends[0][0] - self._step) * self._period()

    def pause(self, seconds: float, now: float) -> None:
        """Decode nothing for so long from `now` on."""
        if not self._live:
            self._at, self._debt = max(self._at, now), 0.0
        self._debt += seconds

    def reread(self) -> None:
        """Compute the cache of all live rows anew."""
        tokens = sum(row.prompt_tokens + self.made(name) for name, row in self._live.items())
        self._debt += self._model.prompt_token_s * tokens

    def made(self, name: str) -> int:
        """Tokens so far of a live row, or 0."""
        row = self._live.get(name)
        return self._step - row.first_step if row is not None else 0

    def names(self) -> list[str]:
        """The live rows."""
        return list(self._live)

    def remove(self, name: str) -> int | None:
        """Drop a row; the tokens that it got, None if it is not known."""
        if name in self._live:
            made = self.made(name)
            del self._live[name]
            return made
        for row in self._queue:
            if row.name == name:
                self._queue.remove(row)
                return 0
        return None

    def _begin_step(self) -> bool:
        """Give free slots to those who came before this step; whether there is any live row."""
        if not self._live and self._queue and self._queue[0].at > self._at:
            # Idle until it came; what is left of a pause goes on until then.
            self._debt = max(0.0, self._debt - (self._queue[0].at - self._at))
            self._at = self._queue[0].at
        while self._queue and len(self._live) < self._slots and self._queue[0].at <= self._at:
            row = self._queue.popleft()
            row.first_step = self._step
            self._live[row.name] = row
            self._begun += 1
            heapq.heappush(self._ends, (self._step + row.new_tokens, self._begun, row))
            self._debt += self._model.prompt_token_s * row.prompt_tokens
        return bool(self._live)

    def _period(self) -> float:
        return self._model.step_s + self._model.token_s * len(self._live)

    def _steps_until(self, now: float) -> int:
        """Whole steps that are over by `now` and alike: until a row ends or a new one may begin."""
        period, start = self._period(), self._at + self._debt
        # A hair more, so that `advance(next_at())` is not short of its last step by rounding.
        steps = math.floor((now - start) / period + 1e-6)
        steps = min(steps, self._ends[0][0] - self._step)
        if self._queue and len(self._live) < self._slots:
            steps = min(steps, max(1, math.ceil((self._queue[0].at - start) / period)))
        return steps

    def _leap(self, steps: int) -> None:
        self._at += self._debt + steps * self._period()
        self._debt = 0.0
        self._step += steps
        self.tokens += steps * len(self._live)
