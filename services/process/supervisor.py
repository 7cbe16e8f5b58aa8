"""Starts, watches, restarts and stops processes of this machine: a run's, or ranks.

The supervisor does nothing by itself: its owner calls `poll` often. That never blocks, so a live
view can share its thread, and with injected processes and clock every decision can be tested.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from umbra.proto.deadline import Deadline
from umbra.proto.errors import (
    DivergedError,
    FailedSamplesError,
    PeerLostError,
    RejectedError,
    UsageError,
)
from umbra.proto.net.session import REPLACES_VARIABLE
from umbra.services.process.child import ChildProcess, Usage, describe_exit, own_exit_code

_LOOK_S = 0.02
FIRST_S = 0.5  # until the first restart
# The same would happen again.
FINAL_CODES = tuple(
    error.exit_code for error in (UsageError, RejectedError, DivergedError, FailedSamplesError)
)
ASKED_CODES = (0, -signal.SIGTERM)  # how a process may end that was asked to


@dataclass(frozen=True, slots=True)
class Program:
    """A process to run. One that is elastic or recovers is started again when it fails: after a
    pause that doubles from `FIRST_S`, `restarts` times within `window_s`.
    """

    name: str
    argv: tuple[str, ...]
    wave: int  # processes are stopped in this order
    elastic: bool = False  # the run can do without it, while there is another of its kind
    recovers: bool = False  # it takes up its work again
    restarts: int = 5
    window_s: float = 60.0
    environ: Mapping[str, str] = field(default_factory=dict)  # is added to its environment
    forked: bool = False  # it needs PyTorch: by a process that has it (`fork_server.py`)


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str  # in one sentence, why the run ended badly
    program: str  # at fault
    exit_code: int  # to end with
    code: int = 0  # with which the program ended itself; a signal's is negative


# Who ends because another process is gone names that one, and not what ended it.
MESSENGER_CODE = PeerLostError.exit_code
CAUSE_S = 180.0  # how long before such an end its cause may have come
GOAL_S = 600.0  # for the goal to be reached once another has left: it may write a large checkpoint


@dataclass(slots=True)
class _Slot:
    program: Program
    failed_at: deque[float] = field(default_factory=deque[float])  # and was started again
    child: ChildProcess | None = None
    pid: int = 0  # of the last child
    restart_at: float | None = None
    restarts: int = 0
    code: int | None = None
    ended_badly: tuple[float, str] | None = None  # when the child last did, and how it said so
    killed: bool = False
    usage: Usage = field(default_factory=Usage)

    @property
    def active(self) -> bool:
        return self.child is not None or self.restart_at is not None


class Supervisor:
    """The processes of one run, or of one of its services."""

    def __init__(
        self,
        spawn: Callable[[Program], ChildProcess],
        *,
        goal: str = "",  # the program whose orderly exit means that the run is done, if any
        report: Callable[[str], None],  # gets a line for people at every event
        last_line: Callable[[str], str] = lambda _name: "",  # that a program said before its end
        stop_s: float = 30.0,  # until a wave is killed; all leave in twice that after the goal
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: Failure | None = None
        self.draining = False
        self._spawn = spawn
        self._goal = goal
        self._report = report
        self._last_line = last_line
        self._stop_s = stop_s
        self._clock = clock
        self._slots: dict[str, _Slot] = {}
        self._wave = -1  # that is being stopped
        self._wave_deadline = 0.0
        self._finishing_since: float | None = None
        self._reached = False

    def start(self, program: Program) -> None:
        self._slots[program.name] = slot = _Slot(program)
        self._start(slot, program)

    def ready(self, name: str) -> dict[str, Any] | None:
        child = self._slots[name].child
        return None if child is None else child.ready()

    def poll(self) -> bool:
        """Handle ended and overdue children; False once nothing runs or will be started."""
        for slot in self._slots.values():
            if slot.child is not None and (code := slot.child.poll()) is not None:
                slot.usage += slot.child.usage
                slot.child, slot.code = None, code
                self._on_exit(slot, code)
        for slot in self._slots.values():
            if slot.restart_at is not None and self._clock() >= slot.restart_at:
                slot.restart_at = None
                slot.restarts += 1
                environ = {**slot.program.environ, REPLACES_VARIABLE: str(slot.pid)}
                self._start(slot, replace(slot.program, environ=environ))
        if self._finishing_since is not None and not self.draining:
            self._check_finish(self._finishing_since)
        if self.draining:
            self._advance_drain()
        return any(slot.active for slot in self._slots.values())

    def drain(self) -> None:
        """Stop everything in order: each wave is asked, and killed once its deadline has passed."""
        if not self.draining:
            self.draining = True
            for slot in self._slots.values():
                slot.restart_at = None
            self._advance_drain()

    def kill(self) -> None:
        self.draining = True
        for slot in self._slots.values():
            slot.restart_at = None
            if slot.child is not None:
                slot.killed = True
                slot.child.kill()

    def wait(self, timeout_s: float) -> bool:
        """Poll for so long, or until nothing runs or will; return whether that is so."""
        deadline = Deadline(timeout_s)
        while (running := self.poll()) and not deadline.passed:
            time.sleep(_LOOK_S)
        return not running

    def close(self) -> None:
        if self.poll():
            self.kill()
            self.wait(math.inf)

    @property
    def done(self) -> bool:
        return self._reached and self.failure is None

    def states(self) -> dict[str, str]:
        return {name: self._state(slot) for name, slot in self._slots.items()}

    def usage(self) -> dict[str, Usage]:
        return {name: slot.usage for name, slot in self._slots.items()}

    def restarts(self) -> dict[str, int]:
        return {name: slot.restarts for name, slot in self._slots.items() if slot.restarts}

    # -- decisions --------------------------------------------------------------------------------

    def _start(self, slot: _Slot, program: Program) -> None:
        slot.child = self._spawn(program)
        slot.pid = slot.child.pid

    def _state(self, slot: _Slot) -> str:
        if slot.child is not None:
            return "stopping" if self.draining else "running"
        if slot.restart_at is not None:
            return f"restarts in {max(0.0, slot.restart_at - self._clock()):.1f} s"
        return describe_exit(slot.code) if slot.code else "done"

    def _on_exit(self, slot: _Slot, code: int) -> None:
        program, name, how = slot.program, slot.program.name, describe_exit(code)
        if self.draining:
            if code not in ASKED_CODES and not slot.killed:
                self._report(f"{name} stopped with {how}{self._last_words(name)}")
            return
        if code not in (0, MESSENGER_CODE):
            slot.ended_badly = self._clock(), f"{name} ended ({how}){self._last_words(name)}"
        if code == 0:
            self._reached = self._reached or name == self._goal
            first = self._finishing_since is None and not program.elastic
            if first or name == self._goal:
                self._finishing_since = self._clock()
        elif not program.elastic and not program.recovers:
            self._fail(slot, f"{name} ended unexpectedly ({how})", code)
        elif program.elastic and self._finishing_since is not None:
            self._report(f"{name} ended with {how} as the run was finishing")
        elif not self._restart_later(slot, code):
            count = f" again, after {slot.restarts} restarts" if slot.restarts else ""
            text = f"{name} ended{count} ({how})"
            kind = name.rpartition("-")[0]  # another generator takes the place of one, no scorer
            same = (s for s in self._slots.values() if s.program.name.startswith(f"{kind}-"))
            if program.elastic and any(other.active for other in same):
                self._report(f"{text} and is not restarted{self._last_words(name)}")
            else:
                self._fail(slot, text, code)

    def _restart_later(self, slot: _Slot, code: int) -> bool:
        now, failed_at = self._clock(), slot.failed_at
        while failed_at and now - failed_at[0] > slot.program.window_s:
            failed_at.popleft()
        if code in FINAL_CODES or len(failed_at) >= slot.program.restarts:
            return False
        delay = FIRST_S * 2 ** len(failed_at)
        failed_at.append(now)
        slot.restart_at = now + delay
        text = f"{slot.program.name} ended ({describe_exit(code)})"
        self._report(f"{text}: restart {slot.restarts + 1} in {delay:g} s")
        return True

    def _fail(self, slot: _Slot, reason: str, code: int) -> None:
        name = slot.program.name
        text = f"{reason}{self._last_words(name)}"
        since = self._clock() - CAUSE_S
        ends = [s.ended_badly for s in self._slots.values() if s is not slot and s.ended_badly]
        cause = min((end for end in ends if end[0] >= since), default=None)
        if code == MESSENGER_CODE and cause is not None:
            text = f"{text}; the first cause: {cause[1]}"
        self.failure = Failure(text, name, own_exit_code(code), code)
        self.drain()

    def _last_words(self, name: str) -> str:
        line = self._last_line(name)
        return f": {line}" if line else ""

    def _check_finish(self, since: float) -> None:
        for slot in self._slots.values():
            if not slot.program.recovers:
                slot.restart_at = None
        alive = [name for name, slot in self._slots.items() if slot.child is not None]
        limit_s = GOAL_S if self._goal in alive else 2 * self._stop_s
        if not alive or self._clock() - since < limit_s:
            return
        text = f"{', '.join(alive)} did not leave within {limit_s:g} s"
        if self._reached:
            self._report(f"the run is done, but {text}: stopping")
            self.drain()
            return
        left = (s for s in self._slots.values() if s.code == 0 and not s.program.elastic)
        culprit = next(left)
        self._fail(culprit, f"{culprit.program.name} left before the run was done, and {text}", 0)

    def _advance_drain(self) -> None:
        alive = [slot for slot in self._slots.values() if slot.child is not None]
        wave = min((slot.program.wave for slot in alive), default=self._wave)
        if begins := wave != self._wave:
            self._wave, self._wave_deadline = wave, self._clock() + self._stop_s
        for slot in alive:
            if slot.child is None or slot.killed or slot.program.wave != wave:
                continue
            if begins:
                slot.child.terminate()
            elif self._clock() >= self._wave_deadline:
                slot.killed = True
                slot.child.kill()
                self._report(f"{slot.program.name} did not stop within {self._stop_s:g} s: killed")
