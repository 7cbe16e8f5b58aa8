"""What a pool of environments and a worker process say to each other, as the pool sees it.

The worker (`worker.py`) sends and receives the same as plain MessagePack maps: it may run in a
Python environment that has neither Umbra nor msgspec.
"""

from __future__ import annotations

from typing import Any

import msgspec

from umbra.services.config import EnvironmentConfig
from umbra.services.environments.protocol import Opening, StepResult
from umbra.services.environments.response import Said


class Setup(msgspec.Struct, tag="setup"):
    """First to a worker: which environment."""

    config: EnvironmentConfig


class Hello(msgspec.Struct, tag="hello"):
    """First from a worker, or why it can't work.

    `room` is how many plays it takes at once. `closes` is whether environments have to be closed,
    `lasting` whether something of theirs outlives them, and is closed when the pipe ends.
    """

    room: int = 1
    closes: bool = False
    lasting: bool = False
    usage_error: str = ""


class Play(msgspec.Struct, tag="play"):
    """To a worker: the last of `responses` is new. `reset` and each step have so many seconds."""

    number: int
    key: str
    row: dict[str, Any]
    responses: list[Said | str]
    opening_s: float
    step_s: float


class Forget(msgspec.Struct, tag="forget"):
    """To a worker: the sample is over. With a number its environment is closed and that is told."""

    key: str
    number: int = 0
    limit_s: float = 0.0  # seconds for that


class GoesOn(msgspec.Struct, tag="goes_on"):
    """From a worker: one call of a play is done, and the next one, a step, begins."""

    number: int


class Played(msgspec.Struct, tag="played"):
    """From a worker: answers, or why there are none.

    `exhausted`: memory ran out, it leaves. `overdue`: the call that was under way took too long.
    """

    number: int
    opening: Opening | None = None  # if the conversation was opened for it
    steps: list[StepResult] = msgspec.field(default_factory=list)
    error: str = ""
    exhausted: bool = False
    overdue: bool = False

    @property
    def results(self) -> list[Opening | StepResult]:
        """All answers, in order."""
        return [*([] if self.opening is None else [self.opening]), *self.steps]


ToWorker = Setup | Play | Forget
FromWorker = Hello | GoesOn | Played
