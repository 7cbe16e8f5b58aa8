"""The socket loop around the broker: requests in, one commit, then replies out."""

from __future__ import annotations

import gc
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import zmq

from umbra.proto.access import SOCKETS
from umbra.proto.errors import EXIT_DONE, FailedSamplesError, UsageError
from umbra.proto.messages import DATA, CommitBatch, LeaseBatch, Welcome
from umbra.proto.net.server import Request, Server
from umbra.proto.sockets import reachable
from umbra.services.buffer.broker import Broker
from umbra.services.buffer.effects import Effect, Measure, Notify, Reply
from umbra.services.buffer.prompts import open_prompts
from umbra.services.buffer.state import RunState
from umbra.services.buffer.store import (
    MemoryStore,
    Store,
    StoreFullError,
    open_marked,
    refuse_marked,
)
from umbra.services.config import RunConfig
from umbra.services.config.rules import check_feasible, implied_staleness
from umbra.services.process.command import ServiceContext
from umbra.services.process.files import DISK, READABLE_MODE
from umbra.services.prompts import Prompt, read_source
from umbra.services.weights.memory import HeapTrimmer

TRAINERS = (LeaseBatch, CommitBatch)  # requests whose answers a step waits for
POLL_S = 0.1  # how late a deadline may be noticed
TICK_S = 0.05
# Small turns begin this far apart: 32 generators that send 1,000 messages/s cost 258 us of CPU each
# instead of 413. The trainer waits for its answers, so turns just after its requests do not pause.
PACE_S = 0.004
TRAINER_S = 0.02
# A commit of more leaves the loop to a second thread; for less its wake-ups cost 60 us too many.
SMALL_BYTES = 256 << 10
WAITING_BYTES = 16 << 20  # for the next commit; beyond that nothing more is taken in
# New objects between collections of these alone, as thousands are made per poll; each takes
# about a microsecond, while everyone waits. Older ones are looked at again after a thousand of
# these: samples and groups need no collection to be freed (`SamplePool._finish`).
GC_THRESHOLDS = 20_000, 1_000


def serve(context: ServiceContext) -> int:
    """Bind, serve until the run is over, write the final status; return the exit code.

    Raises:
        UmbraError: bad prompts, an address that is taken or cannot be bound, the store of another
            run, damaged or in use; or too many samples failed.
    """
    config, heldout = context.config, context.config.eval
    context.begin(f"store {config.buffer.store or 'in the run folder'}")
    check_feasible(config)
    prompts = open_prompts(config.data, seed=config.run.seed, environments=config.environments)
    eval_prompts: list[Prompt] = []
    if heldout.prompts:
        eval_prompts = read_source(heldout.prompts, columns=heldout.columns, section="eval")
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation = uuid.uuid4().hex[:12]
    with (
        closing(open_store(context)) as store,
        zmq_context,
        closing(Server(zmq_context, context.name, incarnation, context.security)) as server,
    ):
        addresses = Addresses(store)
        if context.options["new_address"]:
            addresses.forget()
        run_id = context.run_dir.name if context.run_dir else config.run.name
        control, events, welcome = bind(server, config, run_id, addresses)
        broker = Broker(
            RunState(config, store, prompts, eval_prompts),
            welcome,
            events=events,
            now=server.listened_s,
            wire_counters=server.counters,
            refusals=server.refusals,
        )
        context.log.info(
            "%d prompts; staleness: %s", len(prompts), implied_staleness(config).describe()
        )
        broker.save()
        store.commit()
        context.ready({"broker": control, "data": welcome.data})
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            Service(context, server, broker, store).run()
        finally:
            if context.run_dir is not None:
                status = msgspec.json.encode(broker.status(server.listened_s))
                text = msgspec.json.format(status, indent=2) + b"\n"
                DISK.replace(context.run_dir / "buffer.json", text, mode=READABLE_MODE)
    if broker.failure:
        raise FailedSamplesError(broker.failure)
    return EXIT_DONE


def open_store(context: ServiceContext) -> Store:
    """Open the store of `buffer.store`.

    Raises:
        StoreError: it is damaged, foreign, in use, or not the one of this run.
        UsageError: it cannot be written to.
    """
    where = context.config.buffer.store
    if not where and context.run_dir is not None:
        where = str(context.run_dir / "store")
    if where in ("", "memory"):
        refuse_marked(context.run_dir)
        context.log.warning("the store is in memory: nothing survives the end of this process")
        return MemoryStore()
    try:
        return open_marked(context.run_dir, Path(where))
    except OSError as error:
        raise UsageError(f"buffer.store = {where} cannot be opened: {error.strerror}") from error


def bind(
    server: Server, config: RunConfig, run_id: str, addresses: Addresses
) -> tuple[str, str, Welcome]:
    """Bind all sockets on the host of `run.broker`.

    Return the endpoints of control and events, and the facts sent to joiners.

    A restarted buffer binds where it was before.

    Raises:
        UsageError: it is not tcp://host:port, not ours, or reachable by others without keys.
        StartupError: it is taken.
    """
    address, settings = config.run.broker, config.buffer
    host, separator, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not separator or not host:
        raise UsageError(f"--broker {address}: write it as tcp://host:port (port * picks one)")
    before = addresses.before(host, port, settings.ports)
    control = server.bind("control", before[0], SOCKETS["control"])
    data = server.bind("data", before[1], DATA)
    bound = [control, data, server.bind_events(before[2])]
    addresses.keep(host, bound)
    endpoints = [reachable(endpoint) for endpoint in bound]
    welcome = Welcome(run_id=run_id, heartbeat_s=settings.heartbeat_s, data=endpoints[1])
    return endpoints[0], endpoints[2], welcome


class Service:
    def __init__(
        self, context: ServiceContext, server: Server, broker: Broker, store: Store
    ) -> None:
        self._context = context
        self._server = server
        self._broker = broker
        self._store = store
        self._held: list[Effect] = []  # what may leave only once the store has it
        self._leaving: list[Effect] = []  # the part of it that the commit under way is for
        self._thread = ThreadPoolExecutor(1, "commit")
        self._commit: Future[None] | None = None  # the one under way
        self._wake = server.waker()
        self._trainer_at = 0.0  # when it last asked

    def run(self) -> None:
        drained, ticked_at, freed = False, 0.0, HeapTrimmer()
        with self._thread:
            while True:
                if self._commit and self._store.waiting_bytes > WAITING_BYTES:
                    self._turn_over()  # the disk is slower than they are: let them wait too
                requests = self._server.poll(POLL_S)
                began, now = time.monotonic(), self._server.listened_s
                if requests:
                    self._held += self._broker.handle_all(requests, now)
                if now - ticked_at >= TICK_S:  # it looks at all members, so not at every message
                    ticked_at = now
                    self._held += self._broker.tick(now)
                freed.give_back(now)
                if self._context.stopping.is_set() and not drained:
                    drained = True
                    self._held += self._broker.drain("the buffer was asked to stop", now)
                if self._broker.is_over(now):
                    self._end(now)
                    return
                if self._commit is None or self._commit.done():
                    self._turn_over()
                if requests:
                    self._gather(requests, began)

    def _gather(self, requests: Sequence[Request], began: float) -> None:
        """Let requests come together for the next turn, after a small one that began at `began`."""
        if any(isinstance(request.body, TRAINERS) for request in requests):
            self._trainer_at = began
        if self._commit is None and began - self._trainer_at > TRAINER_S:
            time.sleep(max(began + PACE_S - time.monotonic(), 0.0))

    def _turn_over(self) -> None:
        """End the commit under way, send what waited for it, begin the next; wait for a small one.

        While the disk is full, heartbeats and status are answered nevertheless.
        """
        write = None
        try:
            if self._commit is not None:
                error, self._commit = self._commit.exception(), None  # waits for its end
                if error is not None and not isinstance(error, OSError):
                    raise error
                self._store.settle(error)
                self._broker.room.full("")
                self._let_go()
            self._broker.save()
            if self._store.waiting_bytes > SMALL_BYTES:
                write = self._store.freeze()
            else:
                self._store.commit()
                self._broker.room.full("")
        except StoreFullError as error:
            self._broker.room.full(str(error))
            held = self._leaving + self._held
            self._leaving = [effect for effect in held if not _promises(effect)]
            self._held = [effect for effect in held if _promises(effect)]
            self._let_go()
            return
        self._leaving, self._held = self._held, []
        if write is None:
            self._let_go()
        else:
            self._commit = self._thread.submit(write)
            self._commit.add_done_callback(lambda _: self._wake())

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, []
        self._carry_out(leaving)

    def _end(self, now: float) -> None:
        is_finished = self._broker.finished
        if is_finished:
            self._held += self._broker.close(now)
        for _ in range(2):  # the commit under way, then one for what has come since
            self._turn_over()
        if not is_finished:  # samples in flight can go on when the buffer starts again
            self._carry_out(self._broker.close(now))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply(request, body):
                    self._server.reply(request, body)
                case Notify(identity, body, channel):
                    self._server.push(channel, identity, body)
                case Measure(kind, fields):
                    self._context.metrics.write(kind, **fields)


def _promises(effect: Effect) -> bool:
    """True if this reply must not be sent before the commit."""
    if not isinstance(effect, Reply):
        return False
    return effect.request.channel == "data" or isinstance(effect.body, Welcome)


KEY = "addresses"


class Addresses:
    """The bound addresses, kept in the store for the next start."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def before(self, host: str, port: str, ports: Sequence[int]) -> list[str]:
        """Return where the buffer was bound on `host`, unless another port is asked for.

        `port` is for control, `ports` are for data and events; 0 is any.
        """
        asked = [f"tcp://{host}:{number or '*'}" for number in (port, *ports)]
        try:
            bound: list[str] = msgspec.msgpack.decode(self._store.get(f"{KEY} on {host}"))
        except KeyError:
            return asked
        if port not in ("*", "0") and not bound[0].endswith(f":{port}"):
            return asked
        pairs = zip(asked[1:], bound[1:], strict=True)
        return [bound[0], *(old if new.endswith("*") else new for new, old in pairs)]

    def forget(self) -> None:
        for key in self._store.keys(KEY):
            self._store.delete(key)

    def keep(self, host: str, endpoints: list[str]) -> None:
        self._store.put(f"{KEY} on {host}", msgspec.msgpack.encode(endpoints))
