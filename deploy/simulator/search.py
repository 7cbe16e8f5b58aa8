"""The freshest way to use some machines that is nearly the fastest: division, run-ahead, bound.

More run-ahead and a looser bound on staleness make a run faster, but what is trained on gets older.
So the choice is not the fastest way: of all that are within `TOLERANCE` of the fastest it is the
one with the lowest bound, then the least run-ahead. Tried are taking turns and the divisions of
`compare.splits` at the loosest bound; then, for divisions that are nearly the fastest there, lower
bounds as long as they are nearly as fast, and with the lowest of these less run-ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from umbra.deploy.simulator.compare import simulate, splits
from umbra.deploy.simulator.prediction import Prediction
from umbra.deploy.simulator.scenario import Scenario
from umbra.proto.errors import UsageError

TOLERANCE = 0.05  # of samples/s that freshness is worth


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to use the machines; 0 trainer GPUs and a bound of 0 are taking turns."""

    trainer_gpus: int
    run_ahead: int
    max_staleness: int

    def of(self, scenario: Scenario) -> Scenario:
        """`scenario` used in this way, with steps enough for the pipeline to fill and to empty."""
        return scenario.changed(
            cluster={"trainer_gpus": self.trainer_gpus},
            buffer={"run_ahead": self.run_ahead, "max_staleness": self.max_staleness},
            run={"steps": max(scenario.config.run.steps, 3 * self.run_ahead + 6)},
        )

    def __str__(self) -> str:
        if not self.trainer_gpus:
            return "all take turns"
        return (
            f"{self.trainer_gpus} GPUs train, run_ahead = {self.run_ahead}, "
            f"max_staleness = {self.max_staleness}"
        )


TURNS = Choice(0, 0, 0)


def bounds(most: int) -> list[int]:
    """Bounds and run-aheads that are worth a try: powers of two, and the largest."""
    tried = {most}
    power = 1
    while power < most:
        tried.add(power)
        power *= 2
    return sorted(tried)


def search(scenario: Scenario) -> Iterator[tuple[Choice, Prediction]]:
    """What comes of each way that is tried, one after another; `best` chooses.

    The bound of `scenario` is the loosest one.

    Raises:
        UsageError: it allows nothing but taking turns, or there is nothing to divide.
    """
    most = scenario.config.buffer.max_staleness
    if most < 1:
        raise UsageError(
            "--search tries bounds up to buffer.max_staleness, which is 0: set it to the most that "
            "your objective bears"
        )
    if not scenario.tables.cluster.scorer_gpus:
        yield TURNS, simulate(TURNS.of(scenario))
    loosest: dict[int, Prediction] = {}
    for gpus in splits(scenario):
        choice = Choice(gpus, most, most)
        loosest[gpus] = simulate(choice.of(scenario))
        yield choice, loosest[gpus]
    enough = (1 - TOLERANCE) * max(one.samples_per_s for one in loosest.values())
    for gpus in [gpus for gpus, one in loosest.items() if one.samples_per_s >= enough]:
        lowest = most
        for bound in reversed(bounds(most)[:-1]):
            choice = Choice(gpus, bound, bound)
            yield choice, (one := simulate(choice.of(scenario)))
            if one.samples_per_s < enough:
                break
            lowest = bound
        for ahead in reversed(bounds(lowest)[:-1]):
            choice = Choice(gpus, ahead, lowest)
            yield choice, (one := simulate(choice.of(scenario)))
            if one.samples_per_s < enough:
                break


def best(tried: Sequence[tuple[Choice, Prediction]]) -> Choice:
    """The freshest of those that are nearly the fastest."""
    fastest = max(one.samples_per_s for _, one in tried)
    near = [
        (choice.max_staleness, choice.run_ahead, -one.samples_per_s, choice.trainer_gpus, choice)
        for choice, one in tried
        if one.samples_per_s >= (1 - TOLERANCE) * fastest
    ]
    return min(near, key=lambda entry: entry[:-1])[-1]
