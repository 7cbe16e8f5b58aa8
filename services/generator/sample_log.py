"""Samples to read: now and then what the model said, and the slowest sample since the last time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from umbra.proto.records import Trajectory, unpack_int32
from umbra.services.modeling.chat import Chat
from umbra.services.process.metrics import MetricsFile

EVERY_S = 10.0
TEXT_CHARS = 2_000
FURTHER = 3  # branches of a sample that are shown besides the first


class SampleLog:
    """Writes rows "sample" (with text) and "slow_sample" (without), each once per `EVERY_S`.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(
        self, metrics: MetricsFile, chat: Chat, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._chat = chat
        self._clock = clock
        self._due = clock()
        self._slowest: Trajectory | None = None

    def finished(self, trajectories: Sequence[Trajectory]) -> None:
        """These are done."""
        for trajectory in trajectories:
            if self._slowest is None or _seconds(trajectory) > _seconds(self._slowest):
                self._slowest = trajectory
        now = self._clock()
        if now < self._due or self._slowest is None or not trajectories:
            return
        self._due = now + EVERY_S
        shown = trajectories[-1]
        self._metrics.write(
            "sample",
            prompt=self._text(shown.prompt_ids),
            response=self._text(shown.response_ids),
            further=[
                {"prompt": self._text(one.prompt_ids), "response": self._text(one.response_ids)}
                for one in shown.branches[:FURTHER]
            ],
            **_facts(shown),
        )
        self._metrics.write("slow_sample", **_facts(self._slowest))
        self._slowest = None

    def _text(self, packed: bytes) -> str:
        text = self._chat.text(unpack_int32(packed))
        return text if len(text) <= TEXT_CHARS else f"{text[:TEXT_CHARS]}…"


def _seconds(trajectory: Trajectory) -> float:
    return trajectory.finished_at - trajectory.started_at


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "sample": trajectory.sample_id,
        "prompt_id": trajectory.prompt_id,
        "reward": trajectory.reward,
        "seconds": _seconds(trajectory),
        "tokens": trajectory.sample_tokens,
        "branches": len(trajectory.lines),
        "turns": trajectory.turns,
        "versions": [trajectory.oldest_version, trajectory.newest_version],
        "finish_reason": trajectory.finish_reason,
    }
