"""A deadline says what was awaited, by the clock that it was given."""

from __future__ import annotations

import pytest

from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, StartupError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_names_what_did_not_happen() -> None:
    clock = Clock()
    deadline = Deadline(2.5, "no batch for step 3", clock=clock)
    clock.now += 2.4
    deadline.check()
    assert not deadline.passed
    assert deadline.left_s == pytest.approx(0.1)
    clock.now += 0.1
    assert deadline.passed
    assert deadline.left_s == 0
    with pytest.raises(DeadlineError, match=r"^no batch for step 3 within 2\.5 s: no scorer$"):
        deadline.check(": no scorer")


def test_the_error_may_be_another() -> None:
    with pytest.raises(StartupError, match="the buffer was not up within 0 s"):
        Deadline(0, "the buffer was not up", error=StartupError).check()


def test_it_may_begin_anew() -> None:
    clock = Clock()
    deadline = Deadline(1.0, clock=clock)
    clock.now += 5
    deadline.restart()
    assert deadline.left_s == 1.0
