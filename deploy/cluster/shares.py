"""Divides nodes or GPUs among groups of tasks by their ratios. The rule, in order:

1. A group is due `ratio * units`.
2. It gets the whole part of that, but one unit at least.
3. What is left goes, unit by unit, to the group that is furthest below its due; if too much was
   given (because of the least of one), units come back from the group furthest above its due that
   has more than one. Of equals, the one named first gets, and the one named last gives. A group
   that has all that it can use gets no more; what nobody can use stays idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from umbra.proto.errors import UsageError

TOLERANCE = Fraction(1, 1000)  # ratios are written with a few digits: 0.333


def check_ratios(ratios: Sequence[float], groups: int) -> list[Fraction]:
    """The ratios as exact numbers that add up to 1; equal ones if there are none.

    Raises:
        UsageError: another number of ratios than groups, or a sum that is not 1.
    """
    if not ratios:
        return [Fraction(1, groups)] * groups
    if len(ratios) != groups:
        raise UsageError(
            f"cluster.ratios has {len(ratios)} numbers for {groups} groups: give one to each"
        )
    exact = [Fraction(str(ratio)) for ratio in ratios]
    total = sum(exact, Fraction(0))
    if abs(total - 1) > TOLERANCE * groups:
        terms = " + ".join(f"{ratio:g}" for ratio in ratios)
        raise UsageError(f"cluster.ratios: {terms} = {float(total):g}, and not 1")
    return [ratio / total for ratio in exact]


def divide(ratios: Sequence[Fraction], units: int, limits: Sequence[int | None]) -> list[int]:
    """Units of each group; see the rule above.

    Args:
        ratios: add up to 1.
        units: at least as many as groups.
        limits: the most that a group can use; None is any number.

    Raises:
        ValueError: fewer units than groups.
    """
    if units < len(ratios):
        raise ValueError(f"{units} units for {len(ratios)} groups")
    due = [ratio * units for ratio in ratios]
    given = [max(1, int(share)) for share in due]
    indices = range(len(due))
    while sum(given) > units:
        able = [i for i in indices if given[i] > 1]
        given[max(able, key=lambda i: (given[i] - due[i], i))] -= 1
    while sum(given) < units:
        able = [i for i in indices if (limit := limits[i]) is None or given[i] < limit]
        if not able:
            break
        given[max(able, key=lambda i: (due[i] - given[i], -i))] += 1
    return given
