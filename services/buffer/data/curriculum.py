"""What decides which prompts an epoch has: a function of the user, or the seed alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from umbra.proto.errors import UsageError
from umbra.services.buffer.data.prompts import GroupEnd


@dataclass(slots=True)
class PromptStats:
    """What came of a prompt so far, in all epochs."""

    groups: int = 0  # that were complete, filtered or failed
    filtered: int = 0  # of them, those whose rewards were all equal (buffer.dynamic_sampling)
    failed: int = 0  # of them, those of which a sample could not be had
    samples: int = 0  # that got a reward
    reward_sum: float = 0.0
    bad: int = 0  # filtered and failed groups since buffer.prompt_attempts was counted anew

    @property
    def mean_reward(self) -> float:
        """Of all rewarded samples; 0 if there is none."""
        return self.reward_sum / max(self.samples, 1)

    def add(self, end: GroupEnd) -> None:
        """Count one more group."""
        self.groups += 1
        self.filtered += end.reason == "filtered"
        self.failed += end.reason == "failed"
        self.bad += end.reason != "complete"
        self.samples += len(end.rewards)
        self.reward_sum += sum(end.rewards)


Curriculum: TypeAlias = Callable[[list[dict[str, Any]], int, list[PromptStats]], Sequence[int]]
"""`(rows, epoch, stats)` to the indices of the rows to draw in that epoch, in order.

`stats[i]` is what came of `rows[i]` when the first prompt of the epoch is drawn.
"""


def load_function(key: str, target: str) -> Callable[..., Any]:
    """The function "module:function" that `key` names.

    Raises:
        UsageError: there is none.
    """
    module_name, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), name, None) if name else None
    except Exception as error:
        raise UsageError(f"{key} {target!r}: importing it failed: {error}") from error
    if not callable(function):
        raise UsageError(f'{key} {target!r}: write it as "module:function"')
    return cast(Callable[..., Any], function)


def ask_curriculum(
    curriculum: Curriculum, rows: list[dict[str, Any]], epoch: int, stats: list[PromptStats]
) -> list[int]:
    """The order of an epoch.

    Raises:
        UsageError: the function failed, or returned something else than indices of rows.
    """
    try:
        order = list(curriculum(rows, epoch, stats))
    except Exception as error:
        raise UsageError(
            f"data.curriculum failed for epoch {epoch}: {type(error).__name__}: {error}"
        ) from error
    if not order or not all(type(i) is int and 0 <= i < len(rows) for i in order):
        raise UsageError(
            f"data.curriculum must return indices from 0 to {len(rows) - 1}, at least one; for "
            f"epoch {epoch} it returned {order[:10]}"
        )
    return order
