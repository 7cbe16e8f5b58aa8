"""The env-worker's loop with a fake buffer and fake agents: leases, renewals, ends."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from fakes.loop_bench import FakeChannel, FakeSession

from umbra.proto.errors import DeadlineError, PeerLostError
from umbra.proto.messages import (
    EndSessions,
    LeaseSessions,
    Ok,
    RenewAck,
    RenewLeases,
    SessionLeases,
)
from umbra.proto.records import SessionTask
from umbra.services.env_worker.host import EndedSession, Lease
from umbra.services.env_worker.loop import PAUSE_S, UNREACHABLE_S, EnvWorkerLoop

LEASE_S = 30.0
AGENT = "agent a:b"


@dataclass
class FakeAgents:
    begun: list[SessionTask] = field(default_factory=list)
    forgotten: list[Lease] = field(default_factory=list)
    over: list[EndedSession] = field(default_factory=list)

    def begin(self, task: SessionTask) -> None:
        self.begun.append(task)

    def forget(self, leases: Iterable[Lease]) -> None:
        self.forgotten += leases

    def ended(self) -> list[EndedSession]:
        over, self.over = self.over, []
        return over


@dataclass
class Joined(FakeSession):
    data: FakeChannel = field(default_factory=FakeChannel)


class Bench:
    def __init__(self, rooms: dict[str, int] | None = None, capacity: int = 4) -> None:
        self.session, self.agents, self.now = Joined(), FakeAgents(), 0.0
        self.channel = self.session.data
        self.loop = EnvWorkerLoop(
            cast(Any, self.session),
            self.agents,
            rooms or {AGENT: capacity},
            capacity,
            threading.Event(),
            clock=lambda: self.now,
        )

    def lease(self, *names: str, environment: str = AGENT) -> LeaseSessions:
        told: dict[str, Any] = {"attempt": 1, "environment": environment, "lease_s": LEASE_S}
        tasks = [SessionTask(sample_id=name, url=f"http://h/{name}", **told) for name in names]
        asked = self.channel.answer(LeaseSessions, SessionLeases(tasks=tasks))
        self.loop.turn()
        return asked

    def end(self, *names: str, **why: str) -> None:
        self.agents.over += [EndedSession((name, 1), **why) for name in names]
        self.loop.turn()


def test_it_asks_for_each_environment_that_it_has() -> None:
    bench = Bench({"slow": 1, "quick": 8}, capacity=6)
    bench.loop.turn()
    (asked,) = bench.channel.asked(LeaseSessions)
    assert (asked.environments, asked.rooms, asked.capacity) == (["slow", "quick"], [1, 8], 6)
    bench.lease("a", environment="slow")
    (asked,) = bench.channel.asked(LeaseSessions)
    assert (asked.rooms, asked.capacity) == ([0, 8], 5)
    bench.end("a")
    bench.lease("b", environment="quick")
    (asked,) = bench.channel.asked(LeaseSessions)
    assert (asked.rooms, asked.capacity) == ([1, 7], 5)


def test_it_asks_for_as_much_as_it_has_room_for() -> None:
    bench = Bench()
    bench.loop.turn()
    bench.loop.turn()
    (asked,) = bench.channel.asked(LeaseSessions)
    assert (asked.capacity, asked.environments) == (4, [AGENT])
    bench.lease("a", "b", "c")
    assert [task.sample_id for task in bench.agents.begun] == ["a", "b", "c"]
    (asked,) = bench.channel.asked(LeaseSessions)
    assert asked.capacity == 1
    bench.lease("d")
    assert not bench.channel.asked(LeaseSessions)  # full
    assert bench.session.figures == {"sessions": 4.0, "ended": 0.0, "failed": 0.0}
    bench.end("b", "c", failure="it raised")
    assert bench.channel.answer(EndSessions, Ok()).leases == [("b", 1), ("c", 1)]
    assert bench.channel.asked(LeaseSessions)[0].capacity == 2
    assert bench.session.figures == {"sessions": 2.0, "ended": 2.0, "failed": 2.0}


def test_leases_are_renewed_and_what_is_lost_is_forgotten() -> None:
    bench = Bench()
    bench.loop.turn()
    bench.lease("a", "b")
    assert not bench.channel.asked(RenewLeases)
    bench.now += LEASE_S / 2
    bench.loop.turn()
    assert bench.channel.answer(RenewLeases, RenewAck(lost=["a"])).leases == [("a", 1), ("b", 1)]
    bench.loop.turn()
    assert bench.agents.forgotten == [("a", 1)]
    bench.now += LEASE_S / 2
    bench.loop.turn()
    assert bench.channel.answer(RenewLeases, DeadlineError("late")).leases == [("b", 1)]
    bench.loop.turn()
    assert bench.agents.forgotten == [("a", 1)]  # an answer that is late says nothing


def test_a_question_without_an_answer_is_repeated() -> None:
    bench = Bench()
    bench.loop.turn()
    bench.channel.answer(LeaseSessions, DeadlineError("no answer"))
    bench.loop.turn()
    assert len(bench.channel.asked(LeaseSessions)) == 1


def test_what_it_cannot_reach_goes_back_and_ends_it_in_time() -> None:
    bench = Bench()
    bench.loop.turn()
    bench.lease("a")
    bench.lease()
    bench.channel.answer(LeaseSessions, SessionLeases(tasks=[]))
    bench.end("a", unreachable="refused")
    told = bench.channel.answer(EndSessions, Ok())
    assert (told.leases, told.unbegun) == ([], [("a", 1)])
    assert not bench.channel.asked(LeaseSessions)  # for a moment
    bench.now += PAUSE_S
    bench.loop.turn()
    bench.lease("b", "c")
    bench.end("b")  # which was reached
    bench.now += UNREACHABLE_S + 1
    bench.end("c", unreachable="refused")  # the first again
    bench.now += UNREACHABLE_S + 1
    bench.agents.over.append(EndedSession(("d", 1), unreachable="refused"))
    with pytest.raises(PeerLostError, match=r"set generator\.serve to an address"):
        bench.loop.turn()
