"""The counterparts of rollouts: environments, agents, rewards of groups, and their settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from umbra.services.config import EnvironmentConfig, NamedEnvironment, RunConfig
from umbra.services.config.trajectory_rules import sampling_of
from umbra.services.environments.loading import UNREWARDED
from umbra.services.environments.pool import (
    EnvironmentPool,
    EnvironmentSet,
    open_pool,
)
from umbra.services.generator.checks import check_template
from umbra.services.generator.rollout import Limits, RolloutSettings
from umbra.services.modeling.chat import Chat

log = logging.getLogger(__name__)

_LOOK_S = 0.01

T = TypeVar("T", bound=EnvironmentConfig)


def unrewarded(config: RunConfig) -> RunConfig:

    def bare(one: T) -> T:
        if one not in config.rewarded_by_scorers:
            return one
        return replace(one, kind=UNREWARDED, options={}, python="", reward_scope="sample")

    return replace(
        config,
        environment=bare(config.environment),
        environments=tuple(bare(one) for one in config.environments),
    )


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
