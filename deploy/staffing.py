"""How many generators `umbra up` runs with `generator.count = "auto"`: found by trying, on CPUs.

One more is started where the trainer waits for batches, generators are busy, and cores and memory
are idle. It stays if more samples are trained per second than before, and leaves again otherwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from umbra.proto.messages import Member, Status
from umbra.services.process.host_memory import available_bytes
from umbra.services.process.supervisor import Program
from umbra.services.reporting.figures import busy, idle_causes

WAITS = 0.1  # share of the trainer's time for batches, from which on generation is the bottleneck
BUSY = 0.8  # share of the generators' time, below which another one would have nothing to do
IDLE_CORES = 0.5  # cores without work that another one needs
GAIN = 1.05  # samples/s with another one over those without it, from which on it stays
ROOM = 2.0  # memory that has to be free, over what a generator takes

CPU_TIMES = Path("/proc/stat")
IDLE_COLUMNS = slice(4, 6)  # idle and iowait, in ticks


@dataclass(frozen=True, slots=True)
class Observation:
    """The run as it is at one moment.

    Attributes:
        trained: samples so far.
        steps: committed so far.
        generators: that serve weights.
        waits: share of the trainer's recent time in which it waited for a batch.
        busy: share of the generators' recent time, their mean.
        idle_cores: as of late.
        room: whether there is memory for another one.
    """

    trained: int
    steps: int
    generators: int
    waits: float
    busy: float
    idle_cores: float
    room: bool


class Staffing:
    """Decides by what is seen; starts and stops nothing.

    Args:
        period_s: seconds over which samples are counted at least.
        steps: optimizer steps over which they are counted at least.
        rest_s: seconds without a trial after one that brought nothing; doubles with each.
    """

    def __init__(self, *, period_s: float = 20.0, steps: int = 4, rest_s: float = 120.0) -> None:
        self.wanted = 1
        self._period_s = period_s
        self._steps = steps
        self._rest_s = rest_s
        self._rests_until = 0.0
        self._settling = True  # samples under way are still those of fewer generators
        self._without: float | None = None  # samples/s before the one that is on trial
        self._began = 0.0
        self._looks: list[Observation] = []

    @property
    def on_trial(self) -> bool:
        """Whether the last one that was started may have to leave again."""
        return self._without is not None

    def look(self, now: float, seen: Observation) -> int:
        """How many generators there should be, after this look at the run at `now` (seconds)."""
        if seen.generators != self.wanted or not self._looks:
            self._begin(now, seen, settling=True)
            return self.wanted
        self._looks.append(seen)
        first, took_s = self._looks[0], now - self._began
        if took_s < self._period_s or seen.steps - first.steps < self._steps:
            return self.wanted
        before = self.wanted
        if not self._settling:
            self._decide(now, (seen.trained - first.trained) / took_s)
        self._begin(now, seen, settling=self.wanted != before)
        return self.wanted

    def _decide(self, now: float, rate: float) -> None:
        if self._without is not None:
            if rate < GAIN * self._without:
                self.wanted -= 1
                self._rests_until = now + self._rest_s
                self._rest_s *= 2
            self._without = None
        elif now >= self._rests_until and self._would_help():
            self.wanted += 1
            self._without = rate

    def _would_help(self) -> bool:
        looks = self._looks
        return (
            mean(one.waits for one in looks) >= WAITS
            and mean(one.busy for one in looks) >= BUSY
            and mean(one.idle_cores for one in looks) >= IDLE_CORES
            and looks[-1].room
        )

    def _begin(self, now: float, seen: Observation, *, settling: bool) -> None:
        self._began, self._looks, self._settling = now, [seen], settling


class Foreman:
    """Has as many generators as `staffing` wants, from what the buffer tells of the run.

    Args:
        program: makes the generator of an index; the one with index 0 runs already.
        start: starts a program.
        retire: asks the program of that name to leave for good.
        say: gets a line for people at every change.
    """

    def __init__(
        self,
        program: Callable[[int], Program],
        *,
        start: Callable[[Program], None],
        retire: Callable[[str], None],
        say: Callable[[str], None],
        staffing: Staffing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._program = program
        self._start = start
        self._retire = retire
        self._say = say
        self._staffing = staffing
        self._clock = clock
        self._started = 1
        self._names: list[str] = []  # of those that were started here and stay
        self._cores = IdleCores(clock)
        self._seen: Status | None = None

    def turn(self, status: Status | None) -> None:
        """Act on `status`; called often, one that was seen already changes nothing."""
        if status is None or status is self._seen or status.ending:
            return
        self._seen = status
        before, trial = self._staffing.wanted, self._staffing.on_trial
        wanted = self._staffing.look(self._clock(), look_at(status, self._cores()))
        if wanted > before:
            self._say(f"the trainer waits and cores are idle: generator {wanted} is tried")
            program = self._program(self._started)
            self._started += 1
            self._names.append(program.name)
            self._start(program)
        elif wanted < before:
            self._say(f"generator {before} brought nothing and leaves")
            self._retire(self._names.pop())
        elif trial and not self._staffing.on_trial:
            self._say(f"generator {wanted} makes the run faster and stays")


def look_at(status: Status, idle_cores: float) -> Observation:
    """What `Staffing` needs of `status`."""
    trainers = [member for member in status.members if member.role == "trainer"]
    generators = [member for member in status.members if member.role == "generator"]
    return Observation(
        trained=status.ledger.trained,
        steps=status.version,
        generators=len(generators),
        waits=mean([idle_causes(one.shares).get("batch", 0.0) for one in trainers] or [0.0]),
        busy=mean([busy(one.shares) for one in generators] or [0.0]),
        idle_cores=idle_cores,
        room=available_bytes() >= ROOM * max(map(_resident_bytes, generators), default=0),
    )


class IdleCores:
    """How many of the cores that this process may use had nothing to do since the last call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, path: Path = CPU_TIMES) -> None:
        self._clock = clock
        self._path = path
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
        self._before = (clock(), self._idle_s())
        self._latest = 0.0

    def __call__(self) -> float:
        now, idle_s = self._clock(), self._idle_s()
        if now > self._before[0]:
            self._latest = (idle_s - self._before[1]) / (now - self._before[0])
            self._before = now, idle_s
        return self._latest

    def _idle_s(self) -> float:
        """Seconds; 0 on a system that doesn't say, on which no core counts as idle."""
        if not self._path.is_file():
            return 0.0
        lines = [line.split() for line in self._path.read_text(encoding="ascii").splitlines()]
        ticks = sum(_ticks(line) for line in lines if line and _core(line[0]) in self._cores)
        return ticks / os.sysconf("SC_CLK_TCK")


def _core(label: str) -> int:
    """7 of "cpu7"; -1 of other lines."""
    number = label.removeprefix("cpu")
    return int(number) if number != label and number.isdigit() else -1


def _ticks(columns: Sequence[str]) -> int:
    return sum(map(int, columns[IDLE_COLUMNS]))


def _resident_bytes(member: Member) -> int:
    """What the process of a member of this machine takes; 0 if that cannot be read."""
    try:
        pages = Path(f"/proc/{member.pid}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
