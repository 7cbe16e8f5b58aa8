"""`umbra env-worker`."""

from __future__ import annotations

import threading
from contextlib import closing

from umbra.proto.errors import UsageError
from umbra.services.config.generation import LIBRARIES
from umbra.services.env_worker.hosts import AgentHosts
from umbra.services.env_worker.loop import EnvWorkerLoop
from umbra.services.process.command import ServiceContext, service_command


def run(context: ServiceContext) -> int:
    """Run agents until the run ends or this process is told to stop.

    Raises:
        UsageError: the agent can't be loaded, or there is none.
        UmbraError: a peer was lost.
    """
    config = context.config
    remote = [one for one in config.all_environments if one.run_on == "env_worker"]
    if not remote:
        raise UsageError(
            f"environment.kind = {config.environment.kind} runs beside the generators: an "
            'env-worker needs run_on = "env_worker" in [environment] or some [[environments]], '
            f"and there an agent or the kind {', '.join(LIBRARIES)}"
        )
    wake = threading.Event()
    with closing(AgentHosts.open(remote, wake=wake.set)) as hosts:
        most = config.env_worker.sessions
        rooms = dict.fromkeys(hosts.rooms, most) if most else hosts.rooms
        capacity = most or sum(rooms.values())
        with context.join("env_worker") as session:
            context.ready({"role": "env_worker", "name": context.name, "sessions": capacity})
            EnvWorkerLoop(session, hosts, rooms, capacity, wake).run()
            if session.failure is not None:
                raise session.failure
    return 0


command = service_command("env_worker", run)
