"""The learning rate of each step of a run."""

from __future__ import annotations

import math

from umbra.services.config import TrainerConfig


def learning_rate(config: TrainerConfig, step: int, steps: int) -> float:
    """The rate of update number `step`, counted from 0, of `steps`.

    It rises linearly over `warmup_steps` to the peak, then stays there or falls towards 0, which it
    would reach a step after the last, in a straight line or half a cosine.
    """
    peak = config.learning_rate
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    done = min(1.0, done)
    return peak * (1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2)


def after_extension(config: TrainerConfig, done: int, before: int, steps: int) -> str:
    """What the rate of a run that ended after `done` steps of `before` does, now of `steps`."""
    if config.schedule == "constant":
        return f"the learning rate stays at {config.learning_rate:g}"
    last, first = (learning_rate(config, *at) for at in ((done - 1, before), (done, steps)))
    final = learning_rate(config, steps - 1, steps)
    return (
        f"trainer.schedule = {config.schedule} now spans {steps} steps: the learning rate goes "
        f"from {last:.3g}, where the run ended, to {first:.3g}, and falls to {final:.3g}; "
        "trainer.warmup_steps are not repeated"
    )
