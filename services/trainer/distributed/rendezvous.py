"""The rendezvous of a trainer's ranks, on one host or several, at the start and after a restart.

They meet in a store that rank 0 keeps. Each leaves its card there; once rank 0 has all cards, it
says who is in. A rank that reaches the store of an earlier life, which it is not in, waits for the
next one: so a host that was lost and is back finds the others.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from umbra.proto.deadline import Deadline
from umbra.proto.errors import DeadlineError, UsageError

KNOCK_S = 2.0  # for one attempt to reach rank 0
CONNECT_S = 60.0  # for torch, once it has been reached
RETRY_S = 0.5  # between two
POLL_S = 0.05
TELL_S = 30.0  # between two lines about who is awaited
_IN = "in"  # the key with the cards of all

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank this process is, of how many, and on which hosts they are."""

    rank: int = 0  # -1 if it is not said
    world: int = 1
    per_host: int = 1
    hosts: tuple[str, ...] = ()  # names by node, once the ranks have met

    @classmethod
    def of_environment(cls) -> RankPlace:
        """Return the launcher's ranks; UsageError if hosts have different numbers of them."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if world % per_host:
            raise UsageError(
                f"WORLD_SIZE is {world} and LOCAL_WORLD_SIZE {per_host}: start equally many "
                "trainer ranks on each host"
            )
        return cls(int(os.environ.get("RANK", "-1")), world, per_host)

    @property
    def nodes(self) -> int:
        return self.world // self.per_host

    def node(self, rank: int) -> int:
        return rank // self.per_host

    def describe(self, rank: int) -> str:
        if self.nodes == 1:
            return f"trainer rank {rank}"
        node = self.node(rank)
        return f"trainer rank {rank} on node {node} ({self.hosts[node]})"


Card = tuple[str, str]
"""The entry of a rank in the store: its host, and a random word of its process."""


def meet(
    place: RankPlace,
    timeout_s: float,
    key: str,
    listener: socket.socket | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> tuple[Store, RankPlace]:
    """Return the store of all ranks, once they are there, and `place` with the names of the hosts.

    Ranks that do not come within `timeout_s` are named in a DeadlineError, with the `key` that
    sets it; asked to stop, the process exits. `listener` is where rank 0 is to wait, if `launch`
    has made it.
    """
    deadline, reported_at = Deadline(timeout_s), time.monotonic()
    card = socket.gethostname(), secrets.token_hex(8)
    store: Store | None = None
    while True:
        status: RankPlace | str = (
            f"no rank 0 at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, where "
            "trainer.rendezvous says that node 0 is"
        )
        try:
            store = store or _store(place, deadline, listener)
            if store is not None:
                status = _met(PrefixStore("meet", store), place, card)
                if isinstance(status, RankPlace):
                    return store, status
        except dist.DistError as error:  # rank 0 has ended meanwhile, and will be back
            store, status = None, str(error).strip().splitlines()[0]
        if stopping():
            raise SystemExit(0)
        if deadline.passed or (store is None and place.rank == 0):
            break
        if time.monotonic() - reported_at > TELL_S:
            reported_at = time.monotonic()
            log.info("not all ranks are there yet: %s", status)
        time.sleep(POLL_S if store is not None else RETRY_S)
    raise DeadlineError(
        f"trainer rank {place.rank} on node {place.node(place.rank)} waited {timeout_s:g} s "
        f"({key}) for all ranks: {status}"
    )


def _store(place: RankPlace, deadline: Deadline, listener: socket.socket | None) -> Store | None:
    """Connect to the store; None if it is not up yet."""
    # Within it nobody can ask this process to stop.
    timeout = timedelta(seconds=max(1.0, min(CONNECT_S, deadline.left_s)))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(rendezvous("env://", timeout=timeout))[0]
    host, port, fd = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None
    if place.rank:
        try:
            # torch would try without an end, and could not be asked to stop.
            with closing(socket.create_connection((host, port), timeout=KNOCK_S)):
                pass
        except OSError:
            return None
    elif listener is not None:
        host, port = listener.getsockname()[:2]
        fd = listener.detach()
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host,
        port,
        place.world,
        is_master=place.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=fd,
    )


def _met(store: Store, place: RankPlace, card: Card) -> RankPlace | str:
    """Leave a card; return the place once all are in, or who is missing."""
    rank = place.rank
    if rank == 0 or not store.check([_IN]):  # who is late for this life must not spoil it
        store.set(f"card/{rank}", msgspec.json.encode(card).decode())
    if rank == 0:
        if missing := [r for r in range(place.world) if not store.check([f"card/{r}"])]:
            return _absent(place, missing)
        entries = (store.get(f"card/{r}").decode() for r in range(place.world))
        store.set(_IN, f"[{','.join(entries)}]")
    elif not store.check([_IN]):
        return "other ranks are missing; the log of node 0 names them"
    cards = msgspec.json.decode(store.get(_IN), type=list[Card])
    if cards[rank] != card:
        return (
            f"rank 0 knows another process as rank {rank}, on {cards[rank][0]}: one that ended "
            "just now, or two hosts were started with the same --node-rank"
        )
    return replace(place, hosts=tuple(host for host, _ in cards[:: place.per_host]))


def _absent(place: RankPlace, missing: list[int]) -> str:
    ranks = ", ".join(map(str, missing))
    if place.nodes == 1:
        return f"ranks {ranks} have not joined"
    nodes = ", ".join(f"node {node}" for node in sorted({place.node(rank) for rank in missing}))
    return (
        f"{nodes} (ranks {ranks}) has not joined: `umbra trainer --node-rank` has to run there, "
        "and reach trainer.rendezvous"
    )
