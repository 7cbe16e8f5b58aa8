"""The cells of `staleness.py`: what is compared, and how a run is given exactly that staleness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# All are given the same advantages and the same mean, so that only the correction differs.
SAME = ("advantage=dr_grpo", "aggregation=token_mean", "denominator=trained")

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "naive": ("objective=naive",),
    "ppo": ("objective=ppo",),
    "tis": ("objective=tis",),
    "decoupled": ("objective=decoupled",),
    "decoupled-interpolated": ("objective=decoupled", "proximal=interpolate"),
    "icepop": ("objective=icepop",),
    "m2po": ("objective=m2po",),
    "cispo": ("objective=cispo",),
    "gspo": ("objective=gspo",),
    "prime_rl": ("objective=prime_rl",),
    "opsm": ("objective=ppo", "mask=opsm"),
}
DEFAULT = ("naive", "ppo", "tis", "decoupled", "icepop", "m2po", "cispo")


@dataclass(frozen=True)
class Plan:
    """How long and how fast a task is trained, with one minibatch per version."""

    steps: int
    learning_rate: float
    extra: tuple[str, ...] = ()


# Constant rates, so that a step late in the run hurts as much as one early.
PLANS: dict[tuple[str, str], Plan] = {
    ("sort", "short"): Plan(100, 2e-4),
    ("sort", "full"): Plan(240, 2e-4),
    ("guess", "short"): Plan(80, 2e-3),
    ("guess", "full"): Plan(275, 2e-3),
}
MINIBATCH_RATE = 0.5  # of the rate, where a version is several updates: as in the simulation


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: str
    form: str
    objective: str
    staleness: int
    minibatches: int
    seed: int

    @property
    def key(self) -> str:
        """Names the cell in files."""
        return (
            f"{self.task}-{self.form}-{self.objective}-k{self.staleness}-m{self.minibatches}"
            f"-s{self.seed}"
        )

    def overrides(self) -> list[str]:
        """The settings that differ from the demo's.

        With run_ahead = max_staleness = k and generation faster than training, the queue is always
        full: a sample waits for k commits after the weights that made it, no more ("wait") and no
        fewer. Rows of many short sequences would train faster than one generator can feed, so the
        trainer reads its tokens in long rows, which costs time and changes no number.
        """
        plan = PLANS[self.task, self.form]
        rate = plan.learning_rate * (MINIBATCH_RATE if self.minibatches > 1 else 1.0)
        trainer = (
            *OBJECTIVES[self.objective],
            *SAME,
            f"minibatches={self.minibatches}",
            f"learning_rate={rate:g}",
            "schedule=constant",
            "max_grad_norm=1.0",
            "pack_tokens=768",
            "micro_tokens=4096",
        )
        return [
            *(f"trainer.{key}" for key in trainer),
            f"run.steps={plan.steps}",
            f"run.seed={self.seed}",
            f"buffer.run_ahead={self.staleness}",
            f"buffer.max_staleness={self.staleness}",
            "buffer.stale_policy=wait",
            *plan.extra,
        ]


def cells(
    tasks: Sequence[str],
    form: str,
    objectives: Sequence[str],
    levels: Sequence[int],
    minibatches: Sequence[int],
    seeds: Sequence[int],
) -> Iterator[Cell]:
    """All combinations, seeds outermost, so that a slice of the grid is a grid.

    On-policy with one update every objective has the same gradient: one run stands for all.
    """
    for seed in seeds:
        for task in tasks:
            for updates in minibatches:
                for level in levels:
                    for objective in objectives:
                        if level == 0 and updates == 1 and objective != objectives[0]:
                            continue
                        yield Cell(task, form, objective, level, updates, seed)
