"""The cells of `staleness.py`: what is compared, and how a run is given exactly that staleness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

CLAIM = 0.5  # versions by which the measured mean may differ from what the row says
# All are given the same advantages and the same mean, so that only the correction differs.
SAME = ("advantage=dr_grpo", "aggregation=token_mean", "denominator=trained")

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "naive": ("objective=naive",),
    "ppo": ("objective=ppo",),
    "tis": ("objective=tis",),
    "tis_opsm": ("objective=tis_opsm",),
    "decoupled": ("objective=decoupled",),
    "decoupled-interpolated": ("objective=decoupled", "proximal=interpolate"),
    "icepop": ("objective=icepop",),
    "m2po": ("objective=m2po",),
    "cispo": ("objective=cispo",),
    "gspo": ("objective=gspo",),
    "prime_rl": ("objective=prime_rl",),
    "opsm": ("objective=ppo", "mask=opsm"),
    "ppo-dual": ("objective=ppo", "dual_clip=3.0"),
}
DEFAULT = ("naive", "ppo", "tis", "decoupled", "m2po", "tis_opsm")
# Where p = mu, these are one and the same; so on-policy a single run stands for all of them.
ALIKE = ("naive", "ppo", "tis", "decoupled", "decoupled-interpolated", "icepop", "m2po", "ppo-dual")


@dataclass(frozen=True)
class Plan:
    """How long and how fast a task is trained, with one minibatch per version."""

    steps: int
    learning_rate: float
    max_grad_norm: float


# Chosen on-policy and then left alone. Constant rates, so that a step late in the run hurts as much
# as one early; short runs, because there are hundreds of them.
PLANS: dict[str, Plan] = {
    "sort": Plan(60, 3e-4, 1.0),
    "guess": Plan(60, 2e-3, 1.0),
}
MINIBATCH_RATE = 0.5  # of the rate, where a version is several updates: as in the simulation


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    objective: str
    staleness: int
    minibatches: int
    seed: int

    @property
    def key(self) -> str:
        """Names the cell in files."""
        return f"{self.task}-{self.objective}-k{self.staleness}-m{self.minibatches}-s{self.seed}"

    def overrides(self) -> list[str]:
        """The settings that differ from the demo's.

        With run_ahead = max_staleness = k and a generator that always comes first, the queue is
        full: a sample waits for k commits after the weights that made it, no more ("wait") and no
        fewer.
        """
        plan = PLANS[self.task]
        rate = plan.learning_rate * (MINIBATCH_RATE if self.minibatches > 1 else 1.0)
        trainer = (
            *OBJECTIVES[self.objective],
            *SAME,
            f"minibatches={self.minibatches}",
            f"learning_rate={rate:g}",
            "schedule=constant",
            f"max_grad_norm={plan.max_grad_norm:g}",
        )
        return [
            *(f"trainer.{key}" for key in trainer),
            f"run.steps={plan.steps}",
            f"run.seed={self.seed}",
            f"buffer.run_ahead={self.staleness}",
            f"buffer.max_staleness={self.staleness}",
            "buffer.stale_policy=wait",
            "buffer.store=memory",
            "generator.slots=256",
        ]


def cells(
    tasks: Sequence[str],
    objectives: Sequence[str],
    levels: Sequence[int],
    minibatches: Sequence[int],
    seeds: Sequence[int],
) -> Iterator[Cell]:
    """All combinations, seeds outermost, so that a slice of the grid is a grid.

    Runs that would be the same one are made once: on-policy every objective has the same gradient
    with one update, and those that are `ALIKE` with several.
    """
    for seed, level, task, updates in product(seeds, levels, tasks, minibatches):
        same = [one for one in objectives if level == 0 and (updates == 1 or one in ALIKE)]
        for objective in objectives:
            if objective not in same[1:]:
                yield Cell(task, objective, level, updates, seed)
