"""Puts a generator together from its configuration and runs it."""

from __future__ import annotations

import gc
import logging
import threading
import uuid
from collections.abc import Callable
from contextlib import closing
from functools import partial

from umbra.proto.net.session import Session
from umbra.proto.net.task_client import TaskClient
from umbra.services.config import RunConfig
from umbra.services.generator.activity import Activity, StallWatch, watching
from umbra.services.generator.engines.opening import OpenEngine, computes, engine_here, open_engine
from umbra.services.generator.loop import GeneratorLoop
from umbra.services.generator.pools import open_environments, settings_for, unrewarded
from umbra.services.generator.runner import RolloutRunner
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
        ctx.join("generator") as session,
    ):
        ctx.ready({"role": "generator", "name": ctx.name})
        receiver = _subscribe(session, config, opened)
        if receiver is not None:
            receiver.on_news = wake.set
            load = config.weight_hub.pace.after(config.buffer.engine_stall_s)
            gc.collect()
            gc.freeze()  # to look through all that was imported takes up to a fifth of the CPU
            watch = StallWatch(engine_here(config), load)
            with closing(receiver), watching(watch, session):
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
    limit_s = config.weight_hub.first_version_s(weights_bytes(config.model.name))
    channel = session.weights(deadline_s=limit_s)
    planes = open_planes(config.weight_hub, opened.device, opened.allocate, opened.gpus)
    receiver = Receiver(channel, planes, dtype=opened.dtype)
    waiting = partial(session.progress, "waiting for the trainer's model", 0)
    is_there = receiver.subscribe_unless(session.stopping, limit_s, waiting)
    return receiver if is_there else None
