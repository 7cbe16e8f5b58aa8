"""How often each environment is drawn from: by fixed weights, or by what is learned from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from umbra.proto.errors import UsageError
from umbra.services.buffer.data.prompts import GroupEnd

LEAST = 0.1  # of its weight that an environment keeps, so that it is seen when it teaches again
_LONG, _SHORT = 64, 16  # groups that figures are of, about
_HOPED = 4  # groups that are thought to have taught something before there are any


@dataclass(slots=True)
class EnvironmentStats:
    """What came of the groups of an environment; the newer a group, the more it counts."""

    groups: int = 0  # all that were rewarded, in all
    learnable: float = 1.0  # share of them whose rewards differ: others teach nothing
    reward: float = 0.0  # mean of late
    earlier: float = 0.0  # mean over more groups, and so of earlier; the difference is progress

    def add(self, end: GroupEnd) -> bool:
        """Count one more group; whether it tells anything."""
        rewards = end.rewards
        if end.reason == "failed" or not rewards:
            return False
        self.groups += 1
        mean, differ = sum(rewards) / len(rewards), float(max(rewards) > min(rewards))
        self.learnable += (differ - self.learnable) / min(self.groups + _HOPED, _LONG)
        self.reward += (mean - self.reward) / min(self.groups, _SHORT)
        self.earlier += (mean - self.earlier) / min(self.groups, _LONG)
        return True

    def restore(self, record: Sequence[Any]) -> None:
        """Take over what a record has, field by field in their order."""
        for field, value in zip(fields(self), record, strict=True):
            setattr(self, field.name, value)


Rule: TypeAlias = Callable[[Mapping[str, EnvironmentStats]], Mapping[str, float]]
"""From what came of each environment to a factor of its weight, 0 or more."""


def learnable(stats: Mapping[str, EnvironmentStats]) -> dict[str, float]:
    """Environments that are solved, or hopeless, are drawn from less."""
    return {name: max(LEAST, one.learnable) for name, one in stats.items()}


class EnvironmentWeights:
    """The weights of the moment, which follow from what `stats` have.

    Args:
        weights: as configured.
        stats: of each environment; changed by others.
        rule: gives the factors; None: the weights are fixed.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        stats: Mapping[str, EnvironmentStats],
        rule: Rule | None = None,
    ) -> None:
        self._weights = weights
        self._stats = stats
        self._rule = rule
        self._seen = -1  # groups that the factors are by
        self._factors: Mapping[str, float] = dict.fromkeys(weights, 1.0)

    def shares(self) -> dict[str, float]:
        """The probability of each environment, at the next draw.

        Raises:
            UsageError: a rule of the user failed, or gave something else than factors.
        """
        groups = sum(one.groups for one in self._stats.values())
        if self._rule is not None and groups != self._seen:
            self._factors, self._seen = _asked(self._rule, self._stats), groups
        found = {name: weight * self._factors[name] for name, weight in self._weights.items()}
        total = sum(found.values())
        return {name: value / total for name, value in found.items()}


def _asked(rule: Rule, stats: Mapping[str, EnvironmentStats]) -> dict[str, float]:
    try:
        given = {str(name): float(value) for name, value in rule(stats).items()}
    except Exception as error:
        raise UsageError(
            f"data.environment_weights failed: {type(error).__name__}: {error}"
        ) from error
    sound = all(math.isfinite(value) and value >= 0 for value in given.values())
    if set(given) != set(stats) or not sound or not sum(given.values()) > 0:
        raise UsageError(
            "data.environment_weights must return a number of 0 or more for each of "
            f"{', '.join(stats)}, not all 0; it returned {given}"
        )
    return given
