"""Groups by the version of their oldest token, so that nobody has to look at all of them."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping

from umbra.services.buffer.samples.groups import Group


class Ages:
    """The age of each of `groups`, which others add to and take from.

    A group of which something has moved is looked at when the next question comes, once for all
    that has moved since the last.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        self._groups = groups
        self._moved: dict[str, Group] = dict(groups)
        self._ages: dict[str, int] = {}
        self._by_age: defaultdict[int, dict[str, Group]] = defaultdict(dict)

    def moved(self, group: Group) -> None:
        """`group` or one of its samples is elsewhere, or has other tokens."""
        self._moved[group.group_id] = group

    def first(self, count: int, is_late: Callable[[int], bool]) -> list[Group]:
        """At most `count` groups whose oldest token's version `is_late`, in order of issue."""
        for name, group in self._moved.items():
            self._place(name, group)
        self._moved.clear()
        late = (g for age, there in self._by_age.items() if is_late(age) for g in there.values())
        return heapq.nsmallest(count, late, key=lambda group: group.samples[0].serial)

    def _place(self, name: str, group: Group) -> None:
        """Put `group` where it belongs now."""
        age = group.oldest if name in self._groups else None
        before = self._ages.pop(name, None)
        if before is not None:
            there = self._by_age[before]
            del there[name]
            if not there:
                del self._by_age[before]
        if age is not None:
            self._ages[name] = age
            self._by_age[age][name] = group
