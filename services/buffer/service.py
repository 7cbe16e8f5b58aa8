"""The socket loop around the broker."""

from __future__ import annotations

import socket
import time
import uuid
from contextlib import closing
from pathlib import Path

import msgspec
import zmq

from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.proto.messages import CONTROL, DATA
from umbra.services.buffer.broker import Broker, Endpoints
from umbra.services.buffer.effects import Effect, Measure, Push, Reply
from umbra.services.buffer.prompts import PromptSource
from umbra.services.buffer.store import MemoryStore, Store
from umbra.services.runtime.command import ServiceContext
from umbra.services.runtime.server import Server

POLL_S = 0.1  # how late a deadline may be noticed
WILDCARDS = ("*", "0.0.0.0", "[::]")


def serve(context: ServiceContext) -> int:
    """Bind, serve until the run is over, write the final status; the exit code.

    Raises:
        UsageError: bad prompts, or an address that is none.
        StartupError: the address is taken.
    """
    config = context.config
    prompts = PromptSource(config.data.prompts, shuffle=config.data.shuffle, seed=config.run.seed)
    store = MemoryStore()
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation = uuid.uuid4().hex[:12]
    with zmq_context, closing(Server(zmq_context, context.name, incarnation)) as server:
        control, endpoints = bind(server, config.run.broker)
        broker = Broker(
            config,
            run_id=_run_id(context),
            prompts=iter(prompts),
            store=store,
            endpoints=endpoints,
            now=time.monotonic(),
            wire_counters=server.counters,
        )
        context.log.info("%d prompts; %s", len(prompts.prompts), broker.policy.describe())
        context.ready({"broker": control, "data": endpoints.data})
        try:
            _loop(context, server, broker, store)
        finally:
            _write_status(context.run_dir, broker)
    return EXIT_DONE


def bind(server: Server, address: str) -> tuple[str, Endpoints]:
    """Open all sockets on the host of `address`; what to connect to, control first.

    Raises:
        UsageError: `address` is not of the form tcp://host:port.
        StartupError: it is taken, or not ours.
    """
    host, separator, _port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not separator or not host:
        raise UsageError(f"--broker {address}: write it as tcp://host:port (port * picks one)")
    control = server.bind("control", address, CONTROL)
    data = server.bind("data", f"tcp://{host}:*", DATA)
    events_in, events_out = server.relay_events(f"tcp://{host}:*", f"tcp://{host}:*")
    return _reachable(control), Endpoints(
        data=_reachable(data), events_in=_reachable(events_in), events_out=_reachable(events_out)
    )


def _reachable(endpoint: str) -> str:
    """`endpoint` as others can connect to it: a wildcard becomes this machine's name."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{socket.gethostname() if host in WILDCARDS else host}:{port}"


def _loop(context: ServiceContext, server: Server, broker: Broker, store: Store) -> None:
    drained = False
    while True:
        requests = server.poll(POLL_S)
        now = time.monotonic()
        effects: list[Effect] = []
        for request in requests:
            effects += broker.handle(request, now)
        effects += broker.tick(now)
        if context.stopping.is_set() and not drained:
            drained = True
            effects += broker.drain("the buffer was asked to stop", now)
        is_over = broker.is_over(now)
        if is_over:
            effects += broker.close(now)
        store.flush()
        for effect in effects:
            _carry_out(effect, context, server)
        if is_over:
            return


def _carry_out(effect: Effect, context: ServiceContext, server: Server) -> None:
    match effect:
        case Reply(request, body):
            server.reply(request, body)
        case Push(identity, body):
            server.push("control", identity, body)
        case Measure(kind, fields):
            context.metrics.write(kind, **fields)


def _run_id(context: ServiceContext) -> str:
    return context.run_dir.name if context.run_dir is not None else context.config.run.name


def _write_status(run_dir: Path | None, broker: Broker) -> None:
    """Leave the last status behind, also when the loop ends by an error."""
    if run_dir is not None:
        status = broker.status(time.monotonic())
        target = run_dir / "buffer.json"
        part = target.with_suffix(".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(status), indent=2) + b"\n")
        part.replace(target)
