"""Rollouts that were trained on, as text: some of each step, in `samples.jsonl` of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from umbra.proto.records import Trajectory, unpack_int32
from umbra.services.process.metrics import MetricsFile

FILE = "samples.jsonl"
EVERY_S = 5.0  # between two that are sent to watchers
TOLD_CHARS = 2_000  # of prompt and response, of one that is sent
TOLD_PIECES = 64
FURTHER = 7  # branches whose texts are written, besides the first
CONTEXT = 16  # tokens that are read again before a piece: a character may have several tokens
LOST = "\ufffd"  # what stands for half a character


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
        self._tokenizer = tokenizer
        self._count = count
        self._tell = tell
        self._clock = clock
        self._due = clock()

    def step(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Write some of `trajectories`; training on them made version `step`.

        Their staleness counts from the one before it.
        """
        chosen = spread(sorted(trajectories, key=lambda trajectory: trajectory.reward), self._count)
        rows = [rollout_row(self._tokenizer, trajectory, step) for trajectory in chosen]
        for row in rows:
            self._file.write("rollout", **row)
        if rows and self._clock() >= self._due:
            self._due = self._clock() + EVERY_S
            self._tell(told(rows[step % len(rows)]))

    def close(self) -> None:
        self._file.close()


def spread(ordered: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Return `count` at equal distances, the first and the last among them from two on."""
    if count >= len(ordered):
        return list(ordered)
    if count < 2:
        return list(ordered[:count])
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def rollout_row(tokenizer: Any, trajectory: Trajectory, step: int) -> dict[str, Any]:
    """Return one line of the file.

    `pieces` cut the response into what the model said by weights of one age, and what its
    environment said (staleness None): characters, tokens, staleness in steps. Prompt, response and
    pieces are the first branch's, `further` has the texts of `FURTHER` more.
    """
    ids = unpack_int32(trajectory.response_ids)
    ranges = _ranges(trajectory, step)
    starts = [0, *(end for end, _ in ranges)]
    texts = _texts(tokenizer, ids, starts)
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
        "response": "".join(texts),
        "pieces": [
            [len(text), end - start, staleness]
            for text, start, (end, staleness) in zip(texts, starts, ranges, strict=False)
        ],
        "further": [
            {
                "prompt": _decode(tokenizer, unpack_int32(branch.prompt_ids)),
                "response": _decode(tokenizer, unpack_int32(branch.response_ids)),
            }
            for branch in trajectory.branches[:FURTHER]
        ],
    }


def told(row: dict[str, Any]) -> dict[str, Any]:

    def short(text: str) -> str:
        return text if len(text) <= TOLD_CHARS else f"{text[:TOLD_CHARS]}…"

    texts = {name: short(row[name]) for name in ("prompt", "response")}
    return {**row, **texts, "pieces": row["pieces"][:TOLD_PIECES], "further": []}


def _ranges(trajectory: Trajectory, step: int) -> list[tuple[int, int | None]]:
    """Return the ends of the pieces, in tokens, with their staleness."""
    mask, ranges = trajectory.loss_mask, list[tuple[int, int | None]]()
    for span in trajectory.spans:
        for at in range(span.start, span.end):
            staleness = step - 1 - span.version if mask[at] else None
            if ranges and ranges[-1][1] == staleness:
                ranges[-1] = (at + 1, staleness)
            else:
                ranges.append((at + 1, staleness))
    return ranges


def _texts(tokenizer: Any, ids: Sequence[int], edges: Sequence[int]) -> list[str]:
    """Return the text of each piece; a character that two of them share is in the later one."""
    texts: list[str] = []
    for start, end in pairwise(edges):
        begin = max(0, start - CONTEXT)
        before = _decode(tokenizer, ids[begin:start]).rstrip(LOST)
        text = _decode(tokenizer, ids[begin:end])
        texts.append((text if end == edges[-1] else text.rstrip(LOST))[len(before) :])
    return texts


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
