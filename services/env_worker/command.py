"""`umbra env-worker`."""

from __future__ import annotations

import threading
from contextlib import closing

from umbra.proto.errors import UsageError
from umbra.services.env_worker.host import AgentHost
from umbra.services.env_worker.loop import EnvWorkerLoop
from umbra.services.environments.loading import name_of
from umbra.services.runtime.config.generation import LIBRARIES
from umbra.services.runtime.process.command import ServiceContext, service_command


def run(context: ServiceContext) -> int:
    """Run agents until the run ends or this process is told to stop.

    Raises:
        UsageError: the agent can't be loaded, or there is none.
        UmbraError: a peer was lost.
    """
    config = context.config
    environment = config.environment
    if environment.run_on != "env_worker" or not environment.starts_agents:
        raise UsageError(
            f"environment.kind = {environment.kind} runs beside the generators: an env-worker "
            'needs environment.run_on = "env_worker", and environment.agent or the kind '
            f"{', '.join(LIBRARIES)}"
        )
    wake = threading.Event()
    with closing(AgentHost(environment, wake=wake.set)) as host:
        capacity = config.env_worker.sessions or host.room
        with context.join("env_worker") as session:
            context.ready({"role": "env_worker", "name": context.name, "sessions": capacity})
            EnvWorkerLoop(session, host, [name_of(environment)], capacity, wake).run()
            if session.failure is not None:
                raise session.failure
    return 0


command = service_command("env_worker", run)
