"""What samples with branches (`environment.branches = "train"`) can't be combined with.

The trainer gives a branch the weight 1 / k. That is right for whatever is a sum or a mean over
sequences or tokens with these weights. Named here is what is not such a sum.
"""

from __future__ import annotations

from collections.abc import Iterator

from umbra.proto.bounds import TOKENS
from umbra.services.config import EnvironmentConfig, RunConfig
from umbra.services.config.generation import LIBRARIES
from umbra.services.config.presets import ObjectiveSpec

_WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae")


def branch_faults(config: RunConfig) -> Iterator[str]:
    """What can't work, or has no effect; a sentence each."""
    training = ""
    for one in config.all_environments:
        where = one.where
        if one.branches == "train":
            training = training or f"{where}.branches = train"
            yield from _alone(one, where, config.generator.max_context)
    if not training:
        return
    for setting in _unproven(config, config.trainer.pieces):
        yield f"{training} is not made for {setting}: change one of them"


def _alone(one: EnvironmentConfig, where: str, max_context: int) -> Iterator[str]:
    if not one.asks:
        yield (
            f"{where}.branches = train is for programs that ask the model themselves: set "
            f"{where}.kind to {' or '.join(('agent', *LIBRARIES))}, or remove it"
        )
    if one.max_branches * max_context > TOKENS:
        yield (
            f"{one.max_branches} branches of generator.max_context = {max_context} tokens are more "
            f"than the {TOKENS} of a sample that one message holds: lower max_context to "
            f"{TOKENS // one.max_branches}"
        )


def _unproven(config: RunConfig, pieces: ObjectiveSpec) -> Iterator[str]:
    """Settings that don't read the weights, or look at a response as if it were the sample."""
    if pieces.advantage in _WHITENED:
        yield f"trainer.advantage = {pieces.advantage}, which counts tokens alike to whiten them"
    if pieces.mask == "m2po":
        yield "trainer.mask = m2po, which counts all tokens of a batch alike"
    if pieces.overlong_buffer:
        yield "trainer.overlong_buffer, which punishes one response for its length"
    if pieces.overlong_filter:
        yield "trainer.overlong_filter, which looks at the end of one response"
    if pieces.kl_coef and pieces.kl_in == "reward":
        objective = config.trainer.objective
        yield f"trainer.objective = {objective}, which takes the KL of one response off the reward"
    if config.trainer.router_replay:
        yield "trainer.router_replay, which has the experts of one response"
