"""The socket loop around the broker: requests in, one commit, then replies out."""

from __future__ import annotations

import gc
import os
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from umbra.proto.access import SOCKETS
from umbra.proto.errors import EXIT_DONE, FailedSamplesError, UsageError
from umbra.proto.messages import CommitBatch, LeaseBatch, Welcome
from umbra.proto.net.server import Server
from umbra.proto.net.session import REPLACES_VARIABLE
from umbra.proto.sockets import reachable
from umbra.services.buffer.broker import Broker
from umbra.services.buffer.effects import Effect, Measure, Notify, Reply
from umbra.services.buffer.prompts import open_prompts
from umbra.services.buffer.state import RunState
from umbra.services.buffer.store import Store, StoreFullError, open_store
from umbra.services.config import RunConfig
from umbra.services.config.rules import check_feasible, describe_staleness
from umbra.services.process.command import ServiceContext
from umbra.services.process.files import DISK, READABLE_MODE, explained
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
BOUND = "addresses"  # begins the keys of the bound addresses in the store
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
    config, heldout, run_dir = context.config, context.config.eval, context.run_dir
    context.begin(f"store {config.buffer.store or 'in the run folder'}")
    check_feasible(config)
    prompts = open_prompts(config.data, seed=config.run.seed, environments=config.environments)
    eval_prompts: list[Prompt] = []
    if heldout.prompts:
        eval_prompts = read_source(heldout.prompts, columns=heldout.columns, section="eval")
    zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    incarnation = uuid.uuid4().hex[:12]
    with (
        closing(store_of(context)) as store,
        zmq_context,
        closing(Server(zmq_context, context.name, incarnation, context.security)) as server,
    ):
        if REPLACES_VARIABLE not in os.environ:  # another process may have the ports by now
            for key in store.keys(BOUND):
                store.delete(key)
        control, data, events = map(reachable, bind(server, config, store))
        run_id = run_dir.name if run_dir else config.run.name
        broker = Broker(
            RunState(config, store, prompts, eval_prompts),
            Welcome(run_id=run_id, heartbeat_s=config.buffer.heartbeat_s, data=data),
            events=events,
            now=server.listened_s,
            wire=server,
        )
        context.log.info("%d prompts; staleness: %s", len(prompts), describe_staleness(config))
        broker.save()
        store.commit()
        context.ready({"broker": control, "data": data})
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        try:
            Service(context, server, broker, store).run()
        finally:
            if run_dir is not None:
                status = msgspec.json.encode(broker.status(server.listened_s))
                text = msgspec.json.format(status, indent=2) + b"\n"
                DISK.replace(run_dir / "buffer.json", text, mode=READABLE_MODE)
    if broker.failure:
        raise FailedSamplesError(broker.failure)
    return EXIT_DONE


def store_of(context: ServiceContext) -> Store:
    where, run_dir = context.config.buffer.store, context.run_dir
    if not where and run_dir is not None:
        where = str(run_dir / "store")
    folder = None if where in ("", "memory") else Path(where)
    if folder is None:
        context.log.warning("the store is in memory: nothing survives the end of this process")
    with explained(f"buffer.store = {where} cannot be opened"):
        return open_store(run_dir, folder)


def bind(server: Server, config: RunConfig, store: Store) -> list[str]:
    """Bind control, data and events on the host of `run.broker`; return the bound endpoints.

    They are kept in `store`: a buffer that its supervisor restarts binds where it was before on
    this host, unless another port is asked for; port 0 is any.

    Raises:
        UsageError: it is not tcp://host:port, not ours, or reachable by others without keys.
        StartupError: it is taken.
    """
    address = config.run.broker
    host, separator, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not separator or not host:
        raise UsageError(f"--broker {address}: write it as tcp://host:port (port * picks one)")
    wanted = [f"tcp://{host}:{number or '*'}" for number in (port, *config.buffer.ports)]
    key = f"{BOUND} on {host}"
    with suppress(KeyError):
        before: list[str] = msgspec.msgpack.decode(store.get(key))
        if port in ("*", "0") or before[0].endswith(f":{port}"):
            pairs = zip(wanted[1:], before[1:], strict=True)
            others = [old if new.endswith("*") else new for new, old in pairs]
            wanted = [before[0], *others]
    bound = [
        server.bind("control", wanted[0], SOCKETS["control"]),
        server.bind("data", wanted[1], SOCKETS["data"]),
        server.bind_events(wanted[2]),
    ]
    store.put(key, msgspec.msgpack.encode(bound))
    return bound


@dataclass(eq=False)
class Service:
    context: ServiceContext
    server: Server
    broker: Broker
    store: Store

    def __post_init__(self) -> None:
        self._held: list[Effect] = []  # what may leave only once the store has it
        self._leaving: list[Effect] = []  # the part of it that the commit under way is for
        self._thread = ThreadPoolExecutor(1, "commit")
        self._commit: Future[None] | None = None  # the one under way

    def run(self) -> None:
        drained, freed = False, HeapTrimmer()
        ticked_at = trainer_at = 0.0  # when the trainer last asked
        with self._thread:
            while True:
                if self._commit and self.store.waiting_bytes > WAITING_BYTES:
                    self._turn_over()  # the disk is slower than they are: let them wait too
                requests = self.server.poll(POLL_S)
                began, now = time.monotonic(), self.server.listened_s
                if requests:
                    self._held += self.broker.handle_all(requests, now)
                if now - ticked_at >= TICK_S:  # it looks at all members, so not at every message
                    ticked_at = now
                    self._held += self.broker.tick(now)
                freed.give_back(now)
                if self.context.stopping.is_set() and not drained:
                    drained = True
                    self._held += self.broker.drain("the buffer was asked to stop", now)
                if self.broker.is_over(now):
                    self._end(now)
                    return
                if self._commit is None or self._commit.done():
                    self._turn_over()
                if any(isinstance(request.body, TRAINERS) for request in requests):
                    trainer_at = began
                if requests and self._commit is None and began - trainer_at > TRAINER_S:
                    time.sleep(max(began + PACE_S - time.monotonic(), 0.0))  # more may come

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
                self.store.settle(error)
                self.broker.room.disk = ""
                self._send()
            self.broker.save()
            if self.store.waiting_bytes > SMALL_BYTES:
                write = self.store.freeze()
            else:
                self.store.commit()
                self.broker.room.disk = ""
        except StoreFullError as error:
            self.broker.room.disk = str(error)
            held = self._leaving + self._held
            self._held = [effect for effect in held if _promises(effect)]
            self._leaving = [effect for effect in held if not _promises(effect)]
            self._send()
            return
        self._leaving, self._held = self._held, []
        if write is None:
            self._send()
        else:
            self._commit = self._thread.submit(write)
            self._commit.add_done_callback(lambda _: self.server.wake())

    def _end(self, now: float) -> None:
        is_finished = bool(self.broker.run.finished)
        if is_finished:
            self._held += self.broker.close(now)
        for _ in range(2):  # the commit under way, then one for what has come since
            self._turn_over()
        if not is_finished:  # samples in flight can go on when the buffer starts again
            self._leaving = self.broker.close(now)
            self._send()

    def _send(self) -> None:
        """Carry out the leaving effects."""
        leaving, self._leaving = self._leaving, []
        for effect in leaving:
            match effect:
                case Reply(request, body):
                    self.server.reply(request, body)
                case Notify(identity, body, channel):
                    self.server.push(channel, identity, body)
                case Measure(kind, fields):
                    self.context.metrics.write(kind, **fields)


def _promises(effect: Effect) -> bool:
    """True if this must not be sent before the commit."""
    return isinstance(effect, Reply) and (
        effect.request.channel == "data" or isinstance(effect.body, Welcome)
    )
