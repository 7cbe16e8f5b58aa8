"""The pool that rollouts talk to: environments, or agents that ask for turns themselves."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from umbra.services.config import EnvironmentConfig, NamedEnvironment, RunConfig
from umbra.services.config.trajectory_rules import sampling_of
from umbra.services.environments.environment_set import EnvironmentSet, LimitedPool
from umbra.services.environments.pool import EnvironmentPool, open_pool
from umbra.services.generator.template_check import check_template
from umbra.services.modeling.chat import Chat

log = logging.getLogger(__name__)


def open_environments(
    config: RunConfig,
    environment: EnvironmentConfig,
    chat: Chat,
    *,
    wake: Callable[[], None] = lambda: None,
) -> EnvironmentPool:
    """The pool for `environment`; agents find an endpoint at `generator.serve`.

    Args:
        config: the run.
        environment: what its rollouts talk to, if there is one; else those of `config`.
        chat: knows the tokens that end turns.
        wake: called, from any thread, whenever there may be something to do.

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
    pool = _open_one(config, environment, chat, wake)
    most = environment.concurrency
    return LimitedPool(pool, most) if most else pool


def _open_one(
    config: RunConfig,
    environment: EnvironmentConfig,
    chat: Chat,
    wake: Callable[[], None],
) -> EnvironmentPool:
    check_template(environment, chat)
    if not environment.asks:
        return open_pool(environment, wake=wake)
    # No other environment needs an HTTP server.
    from umbra.services.generator.agents.address import bind
    from umbra.services.generator.agents.calls import CallRules
    from umbra.services.generator.agents.pool import AgentPool, AgentSettings
    from umbra.services.http import read_key

    rules = CallRules(
        sampling_of(config.sampling_for(environment)),
        [*config.sampling.stop_tokens, *map(chat.piece, sorted(chat.stop_ids))],
        override=environment.agent_sampling == "override",
        template_options=config.model.chat_template_kwargs,
        reads_calls=chat.parser.calls or config.model.parser == "none",
        environment=environment,
    )
    key = read_key(config.generator.serve_key, os.environ)
    advertise = config.generator.serve_advertise
    settings = AgentSettings(rules, Path(config.model.path).name, key, advertise)
    bound = bind(config.generator.serve, key)
    pool = AgentPool(environment, settings, bound, wake=wake)
    log.info("agents are served at %s", pool.url)
    return pool
