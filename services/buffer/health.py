"""Warnings about samples that are lost or teach nothing: events in, warnings out.

Recent shares are over the last `BATCHES` batches' worth of groups or samples, so that they are
known even where no batch ever gets full. `docs/operate.md` lists names and bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from umbra.proto.messages import Curves, Rates, RunWarning
from umbra.proto.records import Trajectory
from umbra.services.config import RunConfig

KEPT = 256  # stretches at most; then two and two become one
SHOWN = (
    "reward/mean", "solved", "samples_per_s", "loss", "staleness/total/mean", "staleness/total/max",
    "response_length/mean", "response_length/p99", "truncated", "entropy", "grad_norm", "ess",
    "mismatch/k3",
)  # fmt: skip


@dataclass(slots=True)
class _Stretch:
    first: int
    last: int
    sums: dict[str, tuple[float, int]]  # and counts, by name

    def join(self, later: _Stretch) -> None:
        self.last = later.last
        for name, (value, count) in later.sums.items():
            before, counted = self.sums.get(name, (0.0, 0))
            self.sums[name] = before + value, counted + count

    def mean(self, name: str) -> float | None:
        value, count = self.sums.get(name, (0.0, 0))
        return value / count if count else None


class StepCurves:
    """Means of what the trainer reports, over stretches of steps that get longer with the run."""

    def __init__(self) -> None:
        self._stretches: list[_Stretch] = []
        self._length = 1
        self._last_at: float | None = None

    def add(self, step: int, values: Mapping[str, float], now: float) -> None:
        if self._last_at is not None and (took := now - self._last_at) > 0:
            values = {**values, "samples_per_s": values.get("samples", 0.0) / took}
        self._last_at = now
        own = _Stretch(step, step, {n: (values[n], 1) for n in SHOWN if n in values})
        if self._stretches and step - self._stretches[-1].first < self._length:
            self._stretches[-1].join(own)
            return
        self._stretches.append(own)
        if len(self._stretches) > KEPT:
            self._length *= 2
            kept = self._stretches[0::2]
            for earlier, later in zip(kept, self._stretches[1::2], strict=False):
                earlier.join(later)
            self._stretches = kept

    def cut(self, step: int) -> None:
        """Forget `step` and what follows, which the trainer repeats."""
        self._stretches = [stretch for stretch in self._stretches if stretch.last < step]

    def record(self) -> Curves:
        values = {name: [stretch.mean(name) for stretch in self._stretches] for name in SHOWN}
        curves = {name: line for name, line in values.items() if any(v is not None for v in line)}
        return Curves(steps=[stretch.last for stretch in self._stretches], values=curves)


WINDOW_S = 10.0
RESOLUTION_S = 0.5  # changes that are closer are one
LEAST_S = 1.0  # of less than a second nothing can be said


class Meter:
    """The recent rate of a count: from a change at least `WINDOW_S` ago to the newest one.

    So it is exact for what comes in bursts (a batch a minute) and not zero between two of them; it
    falls once the next burst is overdue.
    """

    def __init__(self, total: int, now: float) -> None:
        self._marks: deque[tuple[float, int]] = deque([(now, total)])

    def see(self, total: int, now: float) -> None:
        """Set the count; a lower one restarts the measurement."""
        newest = self._marks[-1][1]
        if total == newest:
            return
        if total < newest:
            self._marks.clear()
        elif len(self._marks) > 2 and now - self._marks[-2][0] < RESOLUTION_S:
            self._marks.pop()
        self._marks.append((now, total))
        while len(self._marks) > 2 and self._marks[1][0] <= now - WINDOW_S:
            self._marks.popleft()

    def rate(self, now: float) -> float:
        (first_at, first), (last_at, last) = self._marks[0], self._marks[-1]
        return (last - first) / max(last_at - first_at, now - last_at, LEAST_S)


class Throughput:
    def __init__(self, counts: Callable[[], dict[str, int]], now: float) -> None:
        self._counts = counts
        self._before = counts()  # a resumed run has some
        self._meters = {name: Meter(count, now) for name, count in self._before.items()}

    def see(self, now: float) -> None:
        """Read the counts; time before a sample is issued does not count."""
        counts = self._counts()
        if counts["issued_per_s"] == self._before["issued_per_s"]:
            self._meters = {name: Meter(count, now) for name, count in counts.items()}
        for name, count in counts.items():
            self._meters[name].see(count, now)

    def rates(self, now: float) -> Rates:
        self.see(now)
        return Rates(**{name: meter.rate(now) for name, meter in self._meters.items()})


BATCHES = 4  # that are recent
LEAST_SAMPLES = 16  # in a batch's worth: fewer say nothing
EQUAL_REWARDS = 0.8  # share of groups from which on there is a warning; so with the next three
TRUNCATED = 0.2
FAILED = 0.01
STALE = 0.02
REASON_CHARS = 300
SHARES = ("equal_rewards", "truncated", "failed_samples", "stale_samples")  # and warnings


class Share:
    """A recent share of hits: in the last `BATCHES` parts and what follows."""

    def __init__(self, part: int) -> None:
        self.seen = 0  # since this process began
        self._part = part
        self._parts = deque([(0, 0)], maxlen=BATCHES + 1)  # the last one is incomplete

    def add(self, hits: int, seen: int) -> None:
        self.seen += seen
        before = self._parts.pop()
        self._parts.append((before[0] + hits, before[1] + seen))
        if self._parts[-1][1] >= self._part:
            self._parts.append((0, 0))

    @property
    def batches(self) -> int:
        return len(self._parts) - 1

    @property
    def share(self) -> float:
        """Return the recent share; 0 before anything was seen."""
        hits, seen = map(sum, zip(*self._parts, strict=True))
        return hits / max(seen, 1)

    @property
    def known(self) -> float:
        return self.share if self.batches else 0.0


@dataclass(frozen=True, slots=True)
class SampleFailure:
    """A sample that failed, and how many samples ended with it.

    `own`: the reason may depend on its content (a reward or an environment that raised or timed
    out, an answer that is not sound), unlike lost leases.
    """

    sample_id: str
    prompt_id: str
    reason: str
    samples: int
    own: bool


class Health:
    """Warnings about a run's losses of samples, and about groups without a training signal.

    Shares restart with the buffer, so that a run that was ended because of them can continue once
    its cause is fixed.
    """

    def __init__(self, config: RunConfig) -> None:
        buffer = config.buffer
        samples = max(buffer.group_size * buffer.batch_groups, LEAST_SAMPLES)
        self.verdict = ""  # why the run must end, if so
        self._config = config
        self._groups = Share(max(buffer.batch_groups, LEAST_SAMPLES // buffer.group_size))
        self.answers, self._samples, self._stale = Share(samples), Share(samples), Share(samples)
        shares = self._groups, self.answers, self._samples, self._stale
        self._shares = dict(zip(SHARES, shares, strict=True))
        self._failure: SampleFailure | None = None  # the newest
        self._raised: dict[str, RunWarning] = {}

    def answered(self, trajectory: Trajectory) -> None:
        self.answers.add(trajectory.finish_reason == "length", 1)

    def group(self, rewards: Sequence[float]) -> None:
        """Count a complete group, also if it is filtered."""
        self._groups.add(len(rewards) > 1 and len(set(rewards)) == 1, 1)
        self._samples.add(0, len(rewards))

    def failed(self, failure: SampleFailure) -> None:
        if not failure.own:
            return
        self._samples.add(failure.samples, failure.samples)
        self._failure = failure
        limit = self._config.buffer.max_failed_share
        if self._samples.batches == BATCHES and self._samples.share > limit:
            self.verdict = (
                f"{self._failed_text()}. That is more than buffer.max_failed_share = {limit:g}, "
                "and the remaining samples are biased: fix the cause, or raise that share"
            )

    def dropped(self, answers: int) -> None:
        """Count answers that were too old to train on."""
        self._stale.add(answers, answers)

    def trained(self, answers: int) -> None:
        self._stale.add(0, answers)

    def figures(self) -> dict[str, float]:
        return {name: share.share for name, share in self._shares.items()}

    def look(self, version: int) -> list[RunWarning]:
        """Update the warnings at `version`; return those that are new."""
        held = {
            name: RunWarning(name=name, text=text, figures={"share": share}, since=version)
            for name, share, text in self._holding()
        }
        new = [warning for name, warning in held.items() if name not in self._raised]
        for name, before in self._raised.items():
            if name in held:
                held[name] = replace(held[name], since=before.since)
            elif before.until < 0:
                self._raised[name] = replace(before, until=version)
        self._raised |= held
        return new

    def warnings(self) -> list[RunWarning]:
        return [self._raised[name] for name in SHARES if name in self._raised]

    def _holding(self) -> Iterator[tuple[str, float, str]]:
        buffer = self._config.buffer
        taught = self._config.trainer.pieces.advantage == "teacher"  # who reads no rewards
        if not taught and (share := self._groups.known) >= EQUAL_REWARDS:
            text = f"{share:.0%} of recent groups have equal rewards: "
            text += (
                "they are replaced (buffer.dynamic_sampling), which costs as much generation"
                if buffer.dynamic_sampling
                else "they give no gradient; choose prompts that are neither solved nor hopeless, "
                "a finer reward, or buffer.dynamic_sampling"
            )
            yield "equal_rewards", share, text
        if (share := self.answers.known) >= TRUNCATED:
            text = (
                f"{share:.0%} of recent answers were cut off at a limit on tokens "
                f"(sampling.max_tokens = {self._config.longest_turn}, generator.max_context, "
                "environment.max_tokens), and their reward is that of an unfinished answer: allow "
                "more tokens, or set trainer.overlong_filter"
            )
            yield "truncated", share, text
        if (share := self._samples.known) >= FAILED:
            text = f"{self._failed_text()}; above {buffer.max_failed_share:.0%} the run ends "
            yield "failed_samples", share, f"{text}(buffer.max_failed_share)"
        if (share := self._stale.known) >= STALE:
            text = (
                f"{share:.0%} of recent answers were dropped as stale, which favours short ones: "
                'set buffer.stale_policy = "wait", or raise buffer.max_staleness'
            )
            yield "stale_samples", share, text

    def _failed_text(self) -> str:
        text = f"{self._samples.share:.0%} of recent samples ended as failed"
        if (newest := self._failure) is None:
            return text
        return (
            f"{text}, alone or with their group (buffer.straggler_s would keep the others); the "
            f"newest: {newest.reason[:REASON_CHARS]} (sample {newest.sample_id} of prompt "
            f"{newest.prompt_id})"
        )
