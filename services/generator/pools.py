"""What rollouts talk to: environments, agents and rewards of groups, and their settings."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from umbra.proto.records import Trajectory, unpack_int32
from umbra.services.config import EnvironmentConfig, NamedEnvironment, RunConfig
from umbra.services.config.trajectory_rules import sampling_of
from umbra.services.environments.loading import UNREWARDED
from umbra.services.environments.pool import (
    EnvironmentPool,
    EnvironmentSet,
    open_pool,
    open_rewards,
    outcomes_of,
)
from umbra.services.environments.protocol import Row, Said
from umbra.services.generator.checks import check_template
from umbra.services.generator.rollout import Limits, RolloutSettings
from umbra.services.modeling.chat import Chat

log = logging.getLogger(__name__)

_LOOK_S = 0.01

T = TypeVar("T", bound=EnvironmentConfig)


def unrewarded(config: RunConfig, which: Sequence[EnvironmentConfig]) -> RunConfig:
    """Return `config` without the rewards of `which` environments, which come later."""

    def bare(one: T) -> T:
        if one not in which:
            return one
        return replace(one, kind=UNREWARDED, options={}, python="", reward_scope="sample")

    return replace(
        config,
        environment=bare(config.environment),
        environments=tuple(bare(one) for one in config.environments),
    )


def reward_groups(
    made: Sequence[Trajectory], rows: Sequence[dict[str, Any]], config: RunConfig, chat: Chat
) -> tuple[list[Trajectory], list[str]]:
    """Return `made` with rewards, all samples of a prompt judged at once; and what failed of them.

    Prompts' ids are indices of `rows`. Samples of environments that do not reward groups stay as
    they are. Raises UsageError if the reward can't be loaded.
    """
    groups: dict[str, list[Trajectory]] = {}
    judged: list[Trajectory] = []
    for one in made:
        if config.environment_of(rows[int(one.prompt_id)]).reward_scope == "group":
            groups.setdefault(one.prompt_id, []).append(one)
        else:
            judged.append(one)
    failures: list[str] = []
    plays: dict[str, tuple[Row, list[Said | str]]] = {}
    for prompt_id, own in groups.items():
        row = rows[int(prompt_id)]
        stops = config.sampling_for(config.environment_of(row)).stop
        plays[prompt_id] = (
            row,
            [
                chat.said(unpack_int32(one.response_ids), unpack_int32(one.prompt_ids), stops=stops)
                for one in own
            ],
        )
    with closing(open_rewards(config)) as pool:
        for outcome in outcomes_of(pool, plays, lambda: time.sleep(_LOOK_S)):
            own = groups[outcome.key]
            if not isinstance(outcome.value, list):
                failures += [outcome.error] * len(own)
                continue
            judged += [
                replace(one, reward=given.reward, reward_parts=given.reward_parts)
                for one, given in zip(own, outcome.value, strict=True)
            ]
    return judged, failures


def settings_for(
    config: RunConfig, chat: Chat, *, generator: str = "", greedy: bool = False
) -> RolloutSettings:
    """Return the settings of rollouts in the configured environment, or in each of several.

    `generator` is the name of the process, for trajectories; `greedy` takes the most likely token.
    """

    def one(
        environment: EnvironmentConfig, several: Mapping[str, RolloutSettings]
    ) -> RolloutSettings:
        sampling = config.sampling_for(environment)
        return RolloutSettings(
            chat=chat,
            sampling=sampling_of(sampling, greedy=greedy),
            max_context=config.generator.max_context,
            limits=Limits(
                environment.max_turns,
                environment.max_tokens,
                environment.max_branches if environment.branches == "train" else 1,
            ),
            stops=tuple(sampling.stop),
            generator=generator,
            several=several,
        )

    return one(config.environment, {each.name: one(each, {}) for each in config.environments})


def open_environments(
    config: RunConfig,
    environment: EnvironmentConfig,
    chat: Chat,
    *,
    wake: Callable[[], None] = lambda: None,
) -> EnvironmentPool:
    """Open the pool for `environment`, or for each of `config.environments`.

    Agents find an endpoint at `generator.serve`. `wake` is called, from any thread, whenever there
    may be something to do.

    Raises:
        UsageError: environment or agent can't be loaded, the model's chat template can't write its
            turns, or the address can't be served.
        StartupError: its ports are taken.
        DeadlineError: loading took too long.
    """
    if config.environments and not isinstance(environment, NamedEnvironment):
        return EnvironmentSet.opened(
            config.environments,
            lambda one: open_environments(config, one, chat, wake=wake),
        )
    check_template(environment, chat)
    if not environment.asks:
        return open_pool(environment, wake=wake)
    # No other environment needs an HTTP server.
    from umbra.services.generator.agents.calls import CallRules
    from umbra.services.generator.agents.pool import AgentPool, AgentSettings
    from umbra.services.generator.agents.server import bind
    from umbra.services.http import KEY_VARIABLE

    rules = CallRules(
        sampling_of(config.sampling_for(environment)),
        [*config.sampling.stop_tokens, *map(chat.piece, sorted(chat.stop_ids))],
        template_options=config.model.chat_template_kwargs,
        reads_calls=chat.parser.calls or config.model.parser == "none",
    )
    key, name = os.environ.get(KEY_VARIABLE, ""), Path(config.model.path).name
    settings = AgentSettings(rules, name, key, config.generator.serve_advertise)
    pool = AgentPool(environment, settings, bind(config.generator.serve, key), wake=wake)
    log.info("agents are served at %s", pool.url)
    return pool
