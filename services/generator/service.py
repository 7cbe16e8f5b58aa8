"""A generator, put together from its configuration: engine, environments or agents, and loop."""

from __future__ import annotations

import gc
import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from umbra.proto.net.session import Session
from umbra.proto.net.task_client import TaskClient
from umbra.services.config import EnvironmentConfig, NamedEnvironment, RunConfig
from umbra.services.config.generation import sampling_of
from umbra.services.environments.loading import UNREWARDED
from umbra.services.environments.pool import EnvironmentPool, EnvironmentSet, open_pool
from umbra.services.generator.activity import Activity, StallWatch
from umbra.services.generator.checks import check_template
from umbra.services.generator.engines.opening import OpenEngine, computes, engine_here, open_engine
from umbra.services.generator.loop import GeneratorLoop
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.model_directory import weights_bytes
from umbra.services.process.command import ServiceContext
from umbra.services.weights.planes.receiving import open_planes
from umbra.services.weights.receiver import Receiver

log = logging.getLogger(__name__)


def run(
    ctx: ServiceContext, make_engine: Callable[[RunConfig, str], OpenEngine] = open_engine
) -> int:
    """Generate until the run ends or this process has to stop; return the exit code.

    `make_engine` makes the engine; its second argument seeds its sampling.
    """
    config = unrewarded(ctx.config)
    ctx.begin(*computes(config))
    # A process that is started again must not draw what the one before it drew.
    opened = make_engine(config, f"{ctx.name}/{uuid.uuid4().hex}")
    wake = threading.Event()
    settings = settings_for(config, opened.chat, generator=ctx.name)
    # An eighth early: so much is decoded at most while flushed tokens are on their way.
    flush_tokens = config.generator.partial_flush_tokens
    flush_tokens -= flush_tokens // 8
    with (
        closing(opened.engine) as engine,
        closing(open_environments(config, config.environment, opened.chat, wake=wake.set)) as pool,
        ctx.join() as session,
    ):
        ctx.ready({"role": "generator", "name": ctx.name})
        receiver = _subscribe(session, config, opened)
        if receiver is not None:
            receiver.on_news = wake.set
            load = config.weight_hub.pace.after(config.buffer.engine_stall_s)
            gc.collect()
            gc.freeze()  # to look through all that was imported takes up to a fifth of the CPU
            gc.set_threshold(20_000, 1_000)  # and through all samples under way a twentieth
            watch = StallWatch(session, engine_here(config), load)
            with closing(receiver), watch.watching():
                GeneratorLoop(
                    session=session,
                    receiver=receiver,
                    buffer=TaskClient(session.data, wake, grace_s=config.run.broker_grace_s),
                    runner=RolloutRunner(engine, pool, settings, flush_tokens),
                    config=config.generator,
                    watch=watch,
                    activity=Activity(ctx.metrics),
                ).run()
        if session.failure is not None:
            raise session.failure
    return 0


def _subscribe(session: Session, config: RunConfig, opened: OpenEngine) -> Receiver | None:
    """Return a receiver of weights; None if we are stopped before there is a hub with a model.

    Raises:
        DeadlineError: no hub joined, or no trainer registered its model there.
        UsageError: the trainer serves another dtype than the engine computes in.
    """
    session.progress("waiting for the weight hub", 0)
    limit_s = config.weight_hub.first_version_s(weights_bytes(config.model.path))
    channel = session.weights(deadline_s=limit_s)
    planes = open_planes(config.weight_hub, opened.device, opened.allocate, opened.gpus)
    receiver = Receiver(channel, planes, dtype=opened.dtype)
    waiting = partial(session.progress, "waiting for the trainer's model", 0)
    is_there = receiver.subscribe_unless(session.stopping, limit_s, waiting)
    return receiver if is_there else None


def unrewarded(config: RunConfig) -> RunConfig:
    """Return `config` without the rewards that scorers compute."""

    def bare(environment: EnvironmentConfig) -> EnvironmentConfig:
        if environment not in config.rewarded_by_scorers:
            return environment
        return replace(environment, kind=UNREWARDED, options={}, reward_scope="sample")

    return with_environments(config, bare)


def with_environments(config: RunConfig, change: Callable[[Any], Any]) -> RunConfig:
    """Return `config` with what `change` makes of each of its environments."""
    several = tuple(map(change, config.environments))
    return replace(config, environment=change(config.environment), environments=several)


def settings_for(
    config: RunConfig, chat: Chat, *, generator: str = "", greedy: bool = False
) -> RolloutSettings:
    """Return the settings of rollouts in the configured environment, or in each of several.

    `generator` is the name of the process, for trajectories; `greedy` takes the most likely token.
    """

    def settings(environment: EnvironmentConfig) -> RolloutSettings:
        sampling = config.sampling_for(environment)
        return RolloutSettings(
            chat=chat,
            sampling=sampling_of(sampling, greedy=greedy),
            max_context=config.generator.max_context,
            turns=environment.max_turns,
            tokens=environment.max_tokens,
            branches=environment.max_branches if environment.branches == "train" else 1,
            stops=tuple(sampling.stop),
            generator=generator,
        )

    several = {each.name: settings(each) for each in config.environments}
    return replace_fields(settings(config.environment), several=several)


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
            config.environments, lambda each: open_environments(config, each, chat, wake=wake)
        )
    check_template(environment, chat)
    if not environment.asks:
        return open_pool(environment, wake=wake)
    # No other environment needs an HTTP server.
    from umbra.services.generator.agents.calls import CallRules
    from umbra.services.generator.agents.pool import AgentPool, AgentSettings, bind
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
