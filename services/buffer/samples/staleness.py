"""The run-ahead of generation, and the staleness of samples: two bounds, not one.

Symbols (counted in groups, which are issued whole):

    v     version of the trainer = optimizer steps committed
    g     version that a generator serves, g <= v
    B     groups per batch
    A     run_ahead: batches that generation may be ahead
    K     the bound: max_staleness, but 0 if A = 0 (strictly on-policy)
    S     steps of the run
    O     oversample: groups issued beyond those that batches need
    u     untrained groups: issued, neither ended nor committed
    b     v + u // B when a group is issued: the version at which it is due to be trained

Rules, each in one method below:

    admission   a group is issued while  u < min(A + 1, S - v) * B + O
    lease       a sample goes to a generator with  g >= max(b, v) - K
    partial     a partial is continued if its oldest token has version >= max(b, v) - K
    sweep       a sample is stale if any token of it has version < v - K

Admission alone bounds only the aggregate, because groups are trained in the order of their
completion: a straggler can be overtaken for ever. The lease rule keeps old weights out of new
samples and the sweep is the guarantee. Nothing can deadlock: while no group may be issued to a
generator with g = v, u >= B, so a whole batch is under way already, and each of its samples may be
leased at g = v (it was issued under b <= v + K, and v only grows).

Example: B = 2, A = 1, K = 2, v = 3. 6 groups are trained; admission is open until 4 are not. The
third of them has b = 4 and needs g >= 2. It is trained at version 4 if nothing overtakes it:
staleness 4 - g, at most 2. `docs/algorithms.md` has an example.

Sources: AReaL's capacity formula (`staleness_manager.py`) for the admission, prime-rl's and NeMo's
consume-time sweep for the bound; the split in flight / in queue is prime-rl's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from umbra.services.config import RunConfig
from umbra.services.reporting import staleness as split


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    batch_groups: int  # B
    run_ahead: int  # A
    bound: int  # K: the most versions that a trained token may be behind
    steps: int  # S
    oversample: int = 0  # O

    @classmethod
    def of(cls, config: RunConfig) -> StalenessPolicy:
        own, steps = config.buffer, config.run.steps
        return cls(own.batch_groups, own.run_ahead, own.bound, steps, own.oversample)

    @property
    def typical(self) -> int:
        """Return the staleness of a sample not overtaken and begun with the newest weights."""
        return min(self.run_ahead, self.bound)

    def room(self, untrained: int, version: int) -> int:
        """Return how many groups may still be issued; `untrained` is u."""
        needed = min(self.run_ahead + 1, self.steps - version) * self.batch_groups
        return needed + self.oversample - untrained if needed > 0 else 0

    def due_version(self, untrained: int, version: int) -> int:
        """Return b of a group that is issued now; a spare one is due with the last one needed."""
        return version + min(untrained // self.batch_groups, self.run_ahead)

    def required_version(self, due: int, version: int) -> int:
        """Return the oldest version that may sample a token of a sample with b = `due`."""
        return max(due, version) - self.bound

    def is_stale(self, oldest: int | None, version: int) -> bool:
        """Judge a sample by the version of its oldest token; one without tokens (None) is not."""
        return oldest is not None and version - oldest > self.bound


@dataclass(slots=True)
class StalenessStats:
    """Staleness of trained samples, summed up."""

    in_flight: int = 0  # versions that passed while samples were generated
    worst: int = 0
    mixed: int = 0  # samples with tokens of more than one version
    counts: list[int] = field(default_factory=list[int])  # samples by staleness, from 0

    @property
    def samples(self) -> int:
        return sum(self.counts)

    def add(self, oldest: int, newest: int, version: int, samples: int = 1) -> None:
        """Count samples with tokens of versions `oldest` to `newest`, trained at `version`."""
        total, in_flight, _ = split(oldest, newest, version)
        self.in_flight += samples * in_flight
        self.worst = max(self.worst, total)
        self.mixed += samples * (newest != oldest)
        self._count(total, samples)

    def merge(self, other: StalenessStats, sign: int = 1) -> None:
        """Add the sums of `other`, or take them away (-1); the worst stays, it did happen."""
        self.in_flight += sign * other.in_flight
        self.worst = max(self.worst, other.worst)
        self.mixed += sign * other.mixed
        for staleness, samples in enumerate(other.counts):
            if samples:  # a batch has few different ones, however stale it is
                self._count(staleness, sign * samples)

    def _count(self, staleness: int, samples: int) -> None:
        """Bounded, because staleness is."""
        self.counts += [0] * (staleness + 1 - len(self.counts))
        self.counts[staleness] += samples

    def figures(self) -> dict[str, float]:
        count = max(self.samples, 1)
        total = sum(staleness * samples for staleness, samples in enumerate(self.counts))
        return {
            "mean": total / count,
            "max": float(self.worst),
            "in_flight_mean": self.in_flight / count,
            "in_queue_mean": (total - self.in_flight) / count,
            "mixed_fraction": self.mixed / count,
        }
