"""Rewards that are given to samples once they are whole, instead of by their conversations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from msgspec.structs import replace

from umbra.proto.records import Trajectory, unpack_int32
from umbra.services.environments.loading import UNREWARDED
from umbra.services.environments.pool import open_pool
from umbra.services.modeling.chat import Chat
from umbra.services.runtime.config import EnvironmentConfig, RunConfig

_LOOK_S = 0.01


def unrewarded(environment: EnvironmentConfig) -> EnvironmentConfig:
    """What a sample of `environment` is generated with where its reward comes later."""
    return replace(environment, kind=UNREWARDED, options={}, reward_scope="sample")


def reward_groups(
    made: Sequence[Trajectory], rows: Sequence[dict[str, Any]], config: RunConfig, chat: Chat
) -> tuple[list[Trajectory], list[str]]:
    """`made` with rewards, all samples of a prompt judged at once; and what failed of them.

    Args:
        made: their prompts' ids are indices of `rows`.
        rows: the prompts.
        config: the environment and `sampling.stop` are read.
        chat: turns tokens into text.

    Raises:
        UsageError: the reward can't be loaded.
    """
    groups: dict[str, list[Trajectory]] = {}
    for one in made:
        groups.setdefault(one.prompt_id, []).append(one)
    judged: list[Trajectory] = []
    failures: list[str] = []
    with closing(open_pool(config.environment)) as pool:
        for prompt_id, own in groups.items():
            said = [
                chat.said(
                    unpack_int32(one.response_ids),
                    unpack_int32(one.prompt_ids),
                    stops=config.sampling.stop,
                )
                for one in own
            ]
            pool.play(prompt_id, rows[int(prompt_id)], said)
        while groups:
            for outcome in pool.collect():
                own = groups.pop(outcome.key)
                pool.forget(outcome.key)
                if not isinstance(outcome.value, list):
                    failures += [outcome.error] * len(own)
                    continue
                judged += [
                    replace(one, reward=given.reward, reward_parts=given.reward_parts)
                    for one, given in zip(own, outcome.value, strict=True)
                ]
            time.sleep(_LOOK_S)  # each play has a deadline of its own
    return judged, failures
