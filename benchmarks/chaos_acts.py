"""Disturbances of a run by `chaos.py`: kinds, times, and the run's recovery."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from chaos_run import DemoRun

from umbra.proto.errors import UmbraError
from umbra.proto.messages import Member, Status

GAVE_UP_S = 120.0  # for one act to be recovered from
AT_ONCE = 2  # acts that are not recovered from yet
TRAINER_KILLS = 3  # as often as `umbra up` starts a trainer again
KILLS_PER_MINUTE = 4  # of one process: one less than `umbra up` allows
REST_S = 75.0  # between two ends of the whole run
LAST = 20  # steps of a run at whose end it is left to end by itself
STOPPED_S = (0.5, 8.0)  # dead_after_s lies between
MOST = {"generator": 3, "scorer": 2, "relay": 1}
SERVICES = ("buffer", "weight-hub", "trainer", "generator", "scorer", "relay")
# How often each is done, in relation to the others.
WEIGHTS = {"kill": 6, "stop": 3, "drain": 2, "join": 3}


@dataclass
class Act:
    """Something that was done to a process, and how long the run took to get over it."""

    kind: str
    service: str
    name: str
    at: float  # its end: from here on there is something to recover from
    incarnation: str = ""  # of before; a new one has to come, unless it is empty
    lives: int = 0
    baseline: float | None = None
    recovered_s: float | None = None


class Disturber:
    """Does one thing after another to a run, as its random numbers say.

    Args:
        every_s: mean time between two acts.
        say: gets a line for people.
    """

    def __init__(
        self, run: DemoRun, chance: random.Random, every_s: float, say: Callable[[str], None]
    ) -> None:
        self.done: list[Act] = []  # recovered from, or given up on
        self._run = run
        self._chance = chance
        self._every_s = every_s
        self._say = say
        self._open: list[Act] = []
        self._stopped: dict[str, tuple[Act, float]] = {}
        self._kills: list[tuple[str, float]] = []
        self._trainer_kills = 0
        self._rested_at = self._next_at = time.monotonic()

    def turn(self, status: Status | None, *, act: bool) -> None:
        """Check open acts, and begin a new one if it is due and `act` allows it."""
        now = time.monotonic()
        for name, (stopped, until) in list(self._stopped.items()):
            if now >= until:
                self._go_on(name, stopped, now)
        for one in list(self._open):
            if self._is_over(one, status, now):
                one.recovered_s = now - one.at
            elif now - one.at < GAVE_UP_S:
                continue
            else:
                self._say(f"{one.kind} {one.name}: NOT RECOVERED after {GAVE_UP_S:g} s")
            self._open.remove(one)
            self.done.append(one)
        if not act or status is None or now < self._next_at:
            return
        if len(self._open) + len(self._stopped) < AT_ONCE and self._do_something(status, now):
            self._next_at = now + self._chance.expovariate(1 / self._every_s)

    def end(self) -> None:
        """Close the acts at the end of the run."""
        now = time.monotonic()
        for name, (stopped, _) in list(self._stopped.items()):
            self._go_on(name, stopped, now)
        self._open.clear()

    # -- doing ------------------------------------------------------------------------------------

    def _do_something(self, status: Status, now: float) -> bool:
        if now - self._rested_at > REST_S:  # when everything else is over
            calm = not self._open and not self._stopped and status.version < status.steps - LAST
            return calm and self._end_run(self._chance.choice(("kill", "drain")), status, now)
        kinds = list(WEIGHTS)
        kind = self._chance.choices(kinds, [WEIGHTS[k] for k in kinds])[0]
        service = self._chance.choice([s for s in SERVICES if self._is_possible(kind, s)])
        if kind == "join":
            if len(self._named(service)) >= MOST[service]:
                return False
            name = self._run.join(service)
            self._open.append(Act(kind, service, name, now))
            self._say(f"join {name}")
            return True
        busy = {act.name for act in self._open} | set(self._stopped)
        names = [name for name in self._named(service) if name not in busy]
        if not names:
            return False
        name = self._chance.choice(names)
        member = _member(status, name)
        if member is None and service != "buffer":
            return False  # it is on its way in or out
        act = Act(kind, service, name, now, member.incarnation if member else "", self._run.lives)
        if kind == "kill":
            return self._kill(act, now)
        if kind == "stop":
            if not self._run.signal(name, signal.SIGSTOP):
                return False
            until = now + self._chance.uniform(*STOPPED_S)
            self._stopped[name] = (act, until)
            self._say(f"stop {name} for {until - now:.1f} s")
            return True
        return self._drain(act)

    def _is_possible(self, kind: str, service: str) -> bool:
        return service in MOST or kind in ("kill", "stop")  # the others end with the run only

    def _kill(self, act: Act, now: float) -> bool:
        recent = [name for name, at in self._kills if now - at < 60.0]
        if recent.count(act.name) >= KILLS_PER_MINUTE:
            return False
        if act.service == "trainer":
            if self._trainer_kills >= TRAINER_KILLS:
                return False
            self._trainer_kills += 1
        if not self._run.signal(act.name, signal.SIGKILL):
            return False
        self._kills.append((act.name, now))
        self._open.append(act)
        self._say(f"kill {act.name}")
        return True

    def _drain(self, act: Act) -> bool:
        if act.service != "relay" and len(self._named(act.service)) < 2:
            return False  # the last one
        try:
            self._run.drain(act.name)
        except UmbraError:
            return False  # it has just left, or nobody answers
        self._open.append(act)
        self._say(f"drain {act.name}")
        return True

    def _end_run(self, kind: str, status: Status, now: float) -> bool:
        """End the whole run, in order or not, and go on with it."""
        if kind == "kill":
            self._run.signal("run", signal.SIGKILL)
        else:
            try:
                self._run.drain("")
            except UmbraError:
                return False  # the buffer is too busy to answer: later
        self._say(f"{kind} the whole run at step {status.version}")
        while self._run.poll() is None:
            time.sleep(0.1)
        left = self._run.await_end(of_all=False)
        assert not left, f"{left} outlived umbra up"
        self._run.start()
        self._trainer_kills = 0
        self._kills.clear()
        self._open.append(Act(kind, "run", "run", now, lives=self._run.lives))
        self._rested_at = time.monotonic()
        return True

    def _go_on(self, name: str, act: Act, now: float) -> None:
        del self._stopped[name]
        with suppress(ProcessLookupError):
            self._run.signal(name, signal.SIGCONT)
        act.at, act.incarnation = now, ""
        self._open.append(act)

    def _named(self, service: str) -> list[str]:
        """Return the processes of a service that are there now."""
        own = {"scorer": "reward"}.get(service, service)
        prefixes = (own, service)
        return sorted(name for name in self._run.pids() if name.startswith(prefixes))

    # -- looking ----------------------------------------------------------------------------------

    def _is_over(self, act: Act, status: Status | None, now: float) -> bool:
        """Return whether the process works again, or is gone if it was to leave."""
        if act.kind == "drain" and act.service != "run":
            return act.name not in self._run.pids()
        if status is None:
            return False
        found = work(act, status)
        if found is None:
            return False
        if act.baseline is None or found < act.baseline:  # counted from its new start
            act.baseline = found
        return found > act.baseline


def work(act: Act, status: Status) -> float | None:
    """Return the work of the disturbed service so far; None if it is not there (again)."""
    if act.service == "run":
        return float(status.version) if _member_of(status, "trainer") else None
    if act.service == "buffer":
        ledger = status.ledger
        return float(ledger.issued + ledger.trained + sum(ledger.ended.values()))
    member = _member(status, act.name)
    if member is None or member.state != "ready" or member.incarnation == act.incarnation:
        return None
    if act.service == "trainer":
        return float(status.version)
    if act.service == "weight-hub":
        return member.stats.get("pushes", 0.0)
    return float(member.progress)


def _member(status: Status, name: str) -> Member | None:
    return next((member for member in status.members if member.name == name), None)


def _member_of(status: Status, role: str) -> Member | None:
    found = (m for m in status.members if m.role == role and m.state == "ready")
    return next(found, None)
