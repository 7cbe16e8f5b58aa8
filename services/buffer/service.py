"""The socket loop around the broker."""

from __future__ import annotations

import gc
import socket
import time
import uuid
from contextlib import closing
from pathlib import Path

import msgspec
import zmq

from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.proto.messages import CONTROL, DATA, Welcome
from umbra.services.buffer.addresses import Addresses
from umbra.services.buffer.broker import Broker, Endpoints
from umbra.services.buffer.effects import Effect, Measure, Push, Reply
from umbra.services.buffer.log_store import LogStore
from umbra.services.buffer.sources import open_prompts, read_source
from umbra.services.buffer.store import MemoryStore, Store, StoreFullError
from umbra.services.runtime.command import ServiceContext
from umbra.services.runtime.feasibility import check_feasible
from umbra.services.runtime.server import Server

POLL_S = 0.1  # how late a deadline may be noticed
TICK_S = 0.05
GC_THRESHOLD = 50_000  # new objects between collections: thousands are made per poll, and live on
WILDCARDS = ("*", "0.0.0.0", "[::]")


def serve(context: ServiceContext) -> int:
    """Bind, serve until the run is over, write the final status; the exit code.

    Raises:
        UsageError: bad prompts, an address that is none, or the store of another run.
        StartupError: the address is taken.
        StoreError: the store is damaged, foreign, or in use.
    """
    config = context.config
    check_feasible(config)
    prompts = open_prompts(
        config.data, seed=config.run.seed, attempts=config.buffer.prompt_attempts
    )
    eval_prompts = read_source(config.eval.prompts) if config.eval.every else []
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation = uuid.uuid4().hex[:12]
    with (
        closing(open_store(context)) as store,
        zmq_context,
        closing(Server(zmq_context, context.name, incarnation)) as server,
    ):
        control, endpoints = bind(server, config.run.broker, Addresses(store))
        broker = Broker(
            config,
            run_id=_run_id(context),
            prompts=prompts,
            eval_prompts=eval_prompts,
            store=store,
            endpoints=endpoints,
            now=time.monotonic(),
            wire_counters=server.counters,
        )
        context.log.info("%d prompts; %s", len(prompts), broker.policy.describe())
        broker.save()
        store.commit()
        context.ready({"broker": control, "data": endpoints.data})
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD)
        try:
            Service(context, server, broker, store).run()
        finally:
            _write_status(context.run_dir, broker)
    return EXIT_DONE


def open_store(context: ServiceContext) -> Store:
    """The store of `buffer.store`.

    Raises:
        StoreError: it is damaged, foreign, or in use.
        UsageError: it cannot be written to.
    """
    where = context.config.buffer.store
    if not where and context.run_dir is not None:
        where = str(context.run_dir / "store")
    if where in ("", "memory"):
        context.log.warning("the store is in memory: nothing survives the end of this process")
        return MemoryStore()
    try:
        return LogStore(Path(where))
    except OSError as error:
        raise UsageError(f"buffer.store = {where} cannot be opened: {error.strerror}") from error


def bind(server: Server, address: str, addresses: Addresses) -> tuple[str, Endpoints]:
    """Open all sockets on the host of `address`; what to connect to, control first.

    A buffer that starts again binds where it was before, so that the others find it there.

    Raises:
        UsageError: `address` is not of the form tcp://host:port.
        StartupError: it is taken, or not ours.
    """
    host, separator, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not separator or not host:
        raise UsageError(f"--broker {address}: write it as tcp://host:port (port * picks one)")
    before = addresses.before(host, port)
    control = server.bind("control", before.control, CONTROL)
    data = server.bind("data", before.data, DATA)
    events_in, events_out = server.relay_events(before.events_in, before.events_out)
    addresses.keep(host, [control, data, events_in, events_out])
    return _reachable(control), Endpoints(
        data=_reachable(data), events_in=_reachable(events_in), events_out=_reachable(events_out)
    )


def _reachable(endpoint: str) -> str:
    """`endpoint` as others can connect to it: a wildcard becomes this machine's name."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return f"tcp://{socket.gethostname() if host in WILDCARDS else host}:{port}"


class Service:
    """The loop: requests in, one commit, then replies out."""

    def __init__(
        self, context: ServiceContext, server: Server, broker: Broker, store: Store
    ) -> None:
        self._context = context
        self._server = server
        self._broker = broker
        self._store = store
        self._held: list[Effect] = []  # what may leave only once the store has it

    def run(self) -> None:
        """Serve until the run is over."""
        drained, ticked_at = False, 0.0
        while True:
            requests = self._server.poll(POLL_S)
            now = time.monotonic()
            effects: list[Effect] = []
            for request in requests:
                effects += self._broker.handle(request, now)
            if now - ticked_at >= TICK_S:  # it looks at every member, so not after every message
                ticked_at = now
                effects += self._broker.tick(now)
            if self._context.stopping.is_set() and not drained:
                drained = True
                effects += self._broker.drain("the buffer was asked to stop", now)
            is_over = self._broker.is_over(now)
            if is_over:
                if not self._broker.finished:
                    self._flush([])  # what is in flight can go on when the buffer starts again
                effects += self._broker.close(now)
            if not is_over or self._broker.finished:
                self._flush(effects)
            else:
                self._carry_out(effects)
            if is_over:
                return

    def _flush(self, effects: list[Effect]) -> None:
        """Store what has changed, then let `effects` happen; they wait while the disk is full.

        Only what promises something waits: heartbeats and status are answered meanwhile.
        """
        self._broker.save()
        self._held += effects
        try:
            self._store.commit()
        except StoreFullError as error:
            self._broker.room.full(str(error))
            free = [e for e in self._held if not (isinstance(e, Reply) and _promises(e))]
            self._held = [e for e in self._held if isinstance(e, Reply) and _promises(e)]
            self._carry_out(free)
            return
        self._broker.room.full("")
        held, self._held = self._held, []
        self._carry_out(held)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(request, body):
                    self._server.reply(request, body)
                case Push(identity, body, channel):
                    self._server.push(channel, identity, body)
                case Measure(kind, fields):
                    self._context.metrics.write(kind, **fields)


def _promises(reply: Reply) -> bool:
    """Whether the reply tells of something that has to be in the store."""
    return reply.request.channel == "data" or isinstance(reply.body, Welcome)


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
