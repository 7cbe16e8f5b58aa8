"""Which sampler gets which request, and the journal that keeps requests."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling
from umbra.services.tinker.journal import FuturesJournal
from umbra.services.tinker.sampler import _LiveJob
from umbra.services.tinker.samplers import TRIES, SampleJob, SampleLeases, devices
from umbra.services.tinker.wire import TrainedShape, Weights, write_samples

SLOTS = 4


def job(name: str, version: str = "v1", count: int = 1) -> SampleJob:
    return SampleJob(
        id=name,
        weights=Weights(TrainedShape(rank=4), version),
        prompt=[1],
        count=count,
        sampling=Sampling(),
        max_tokens=8,
        stop_tokens=None,
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def leases(samplers: int, clock: Clock | None = None) -> SampleLeases:
    made = SampleLeases(SLOTS, 10.0, clock or Clock())
    for name in range(samplers):
        made.join(name)
    return made


def given(made: SampleLeases, *jobs: SampleJob) -> list[tuple[int, str]]:
    for one in jobs:
        made.add(one)
    return [(sampler, one.id) for sampler, one in made.assign()]


@pytest.mark.parametrize(
    ("samplers", "jobs", "wanted"),
    [
        (0, [job("a")], []),
        (2, [job("a"), job("b"), job("c")], [(0, "a"), (1, "b"), (0, "c")]),
        # A version goes to an idle sampler rather than to one that would have to drain,
        (2, [job("a"), job("b", "v2"), job("c", "v2")], [(0, "a"), (1, "b"), (1, "c")]),
        # and to that one before it waits.
        (2, [job("a"), job("b", "v2", 4), job("c", "v2")], [(0, "a"), (1, "b"), (0, "c")]),
        # A sampler with a free slot takes a whole request; without one none, in their order.
        (1, [job("a", count=3), job("b", count=9), job("c")], [(0, "a"), (0, "b")]),
    ],
)
def test_requests_go_to_samplers(
    samplers: int, jobs: list[SampleJob], wanted: list[tuple[int, str]]
) -> None:
    assert given(leases(samplers), *jobs) == wanted


def test_a_request_of_a_sampler_that_ends_goes_to_another_and_is_answered_once() -> None:
    made = leases(2)
    assert given(made, job("a"), job("b"), job("c")) == [(0, "a"), (1, "b"), (0, "c")]
    given(made, job("d", count=9), job("e"))
    assert made.leave(0) == []
    assert made.assign() == []  # d fills the other one
    assert made.note(1, "d") and not made.note(1, "d")
    assert given(made) == [(1, "a"), (1, "c"), (1, "e")]  # the oldest first
    assert made.note(1, "a") and made.note(1, "b")


def test_a_request_that_samplers_end_with_is_alone_in_the_end_and_then_fails() -> None:
    made = leases(1)
    given(made, job("bad"), job("good"))
    for sampler in range(TRIES - 1):
        assert made.leave(sampler) == []
        made.join(sampler + 1)
        found = given(made)
    assert found == [(TRIES - 1, "bad")]  # pyright: ignore[reportPossiblyUnboundVariable]
    assert [one.id for one in made.leave(TRIES - 1)] == ["bad"]
    made.join(TRIES)
    assert given(made) == [(TRIES, "good")]
    assert made.note(TRIES, "good")


def test_a_silent_sampler_with_requests_is_overdue() -> None:
    clock = Clock()
    made = leases(2, clock)
    clock.now = 100.0
    given(made, job("a"))
    assert made.overdue() == []  # it begins now, and the other one has nothing to do
    clock.now = 109.0
    assert not made.note(0, "")
    clock.now = 119.5
    assert made.overdue() == [0]
    made.note(0, "a")
    assert made.overdue() == []


@pytest.mark.parametrize(
    ("asked", "gpus", "wanted"),
    [
        ("auto", 0, ["auto"] * 3),
        ("cuda", 1, ["cuda"] * 3),
        ("cpu", 4, ["cpu"] * 3),
        ("auto", 3, ["cuda:1", "cuda:2", "cuda:1"]),
    ],
)
def test_samplers_leave_the_trainer_its_gpu(asked: str, gpus: int, wanted: list[str]) -> None:
    assert devices(asked, 3, gpus) == wanted


def test_samples_are_told_in_the_order_of_their_start() -> None:
    """That of their ends would put short ones first."""
    first, second = ([1, 2], [-0.5, -0.5], False), ([3], [-0.25], True)
    live = _LiveJob(job("a", count=2), samples={"a/1": second, "a/0": first})
    assert live.answer().body == write_samples([first, second])


def test_a_journal_of_another_schema_is_refused(tmp_path: Path) -> None:
    for _ in range(2):  # the second finds the first one's schema
        FuturesJournal(tmp_path / "journal").close()
    with closing(sqlite3.connect(tmp_path / "journal")) as file:
        file.execute("PRAGMA user_version = 1")
    with pytest.raises(UsageError, match="has schema 1, not 2: name another --dir"):
        FuturesJournal(tmp_path / "journal")
