"""Rollouts that were trained on, as text: some of each step, in `samples.jsonl` of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from umbra.proto.records import Trajectory, unpack_int32
from umbra.services.process.metrics import MetricsFile

FILE = "samples.jsonl"
EVERY_S = 5.0  # between two that are sent to watchers
TOLD_CHARS = 2_000  # of prompt and response, of one that is sent


class RolloutLog:
    """A log of `log.samples` rollouts of each step, spread over its rewards from worst to best.

    `tell` hands one to those who watch, now and then.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        count: int,
        tell: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = MetricsFile(folder / FILE if count else None, "trainer")
        self._tokenizer, self._count = tokenizer, count
        self._tell, self._clock, self._due = tell, clock, clock()

    def step(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write some of `trajectories`; training on them made version `step`.

        Their staleness counts from the one before it.
        """
        chosen = spread(sorted(trajectories, key=lambda trajectory: trajectory.reward), self._count)
        rows = [_row(self._tokenizer, trajectory, step) for trajectory in chosen]
        for row in rows:
            self._file.write("rollout", **row)
        if rows and self._clock() >= self._due:
            self._due = self._clock() + EVERY_S
            self._tell(told(rows[step % len(rows)]))

    def close(self) -> None:
        self._file.close()


def spread(ordered: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Return `count` at equal distances, the first and the last among them from two on."""
    count = min(count, len(ordered))
    return [ordered[round(i * (len(ordered) - 1) / max(1, count - 1))] for i in range(count)]


def _row(tokenizer: Any, trajectory: Trajectory, step: int) -> dict[str, Any]:
    """Return one line of the file; prompt and response are the first branch's."""
    return {
        "step": step,
        "sample": trajectory.sample_id,
        "group": trajectory.group_id,
        "prompt_id": trajectory.prompt_id,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "tokens": trajectory.sample_tokens,
        "branches": len(trajectory.lines),
        "turns": trajectory.turns,
        "seconds": trajectory.finished_at - trajectory.started_at,
        "finish_reason": trajectory.finish_reason,
        "staleness": step - 1 - trajectory.oldest_version,
        "prompt": _decode(tokenizer, unpack_int32(trajectory.prompt_ids)),
        "response": _decode(tokenizer, unpack_int32(trajectory.response_ids)),
    }


def told(row: dict[str, Any]) -> dict[str, Any]:
    texts = {name: row[name] for name in ("prompt", "response")}
    short = {n: t if len(t) <= TOLD_CHARS else f"{t[:TOLD_CHARS]}…" for n, t in texts.items()}
    return {**row, **short}


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
