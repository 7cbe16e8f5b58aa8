"""The weight hub as a process: it binds, joins the run and serves until it is told to stop."""

from __future__ import annotations

import uuid

import zmq

from umbra.proto.net.address import reachable
from umbra.proto.net.server import Server
from umbra.proto.net.session import Session
from umbra.services.process.command import ServiceContext
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weights.planes.choice import check_plane


def serve(context: ServiceContext) -> int:
    """Run the hub until it is told to stop; the exit code.

    Raises:
        UsageError: the configured plane is not available, or an address cannot be bound.
        StartupError: the address is taken, or no broker answers.
        UmbraError: why the run was given up.
    """
    config = context.config.weight_hub
    check_plane(config.plane)
    context.security.check_bind(config.buckets_listen or config.listen)
    context.security.check_bind(config.connections_listen or config.listen)
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(zmq_context, context.name, uuid.uuid4().hex[:12], context.security)
    try:
        endpoint = reachable(server.bind(CHANNEL, config.listen, ACCEPTS), config.advertise)
        with context.join("weight_hub", {CHANNEL: endpoint}) as session:
            hub = WeightHub(server, session.welcome.run_id, config, context.metrics)
            try:
                context.ready({CHANNEL: endpoint})
                _loop(hub, session)
            finally:
                hub.close()
            if session.failure is not None:
                raise session.failure
    finally:
        server.close()
        zmq_context.term()
    return 0


def _loop(hub: WeightHub, session: Session) -> None:
    while not session.stopping.is_set():
        served = hub.step()
        idle = "waiting for a part hub" if hub.protocol.held_back else "waiting"
        session.progress("serving" if served and not hub.protocol.held_back else idle, 1)
        session.stats(**hub.stats())
