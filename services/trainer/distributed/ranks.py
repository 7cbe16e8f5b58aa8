"""The ranks of a trainer: rank 0 leads, and all do the same things in the same order.

Rank 0 alone is a member of the run. What it decides reaches the others as bytes over the process
group, which they enter when it has announced them: until then they wait for as long as it lives
(`heartbeat.py`). A rank that dies closes its connections, which the others notice in the collective
that they are in, or in the next one; within a collective none may be silent for longer than
`trainer.rank_timeout_s`. The ranks may be on several hosts, on each equally many neighbours.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from umbra.proto.deadline import Deadline
from umbra.proto.errors import EXIT_DONE, PeerLostError, UmbraError, UsageError
from umbra.proto.net.address import interface_towards
from umbra.services.config import TrainerConfig
from umbra.services.process.supervisor import FINAL_CODES
from umbra.services.trainer.distributed.heartbeat import POLL_S, Liveness
from umbra.services.trainer.distributed.rendezvous import Hosts, RankPlace, meet

if TYPE_CHECKING:
    from umbra.services.modeling.expert_parallel import ExpertGroup
    from umbra.services.modeling.sequence_parallel import SequenceGroup

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 31  # of one message of rank 0
LEAVE_S = 3.0  # that rank 0 keeps the store for others that are about to leave
# In the store: messages of rank 0 so far, who is done, why there is nothing more to be done.
_SAID, _LEFT, _ENDED = "said", "left", "ended"
# How torch's backends say that a peer is gone; they raise plain RuntimeErrors.
_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "broken pipe")


@dataclass(frozen=True, slots=True)
class Grid:
    """Replicas of the policy: `replicas` rows of neighbouring ranks, each with a whole policy.

    Attributes:
        across: the ranks that hold the same rows of parameters as this one.
        within: the ranks of this one's replica.
    """

    replicas: int
    across: dist.ProcessGroup
    within: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Groups:
    """Process groups that a rank is in.

    Attributes:
        every: None is torch's default one, of all ranks.
        sequence: the ranks with which this one shares the tokens of each row, if there are any.
        experts: those with which it divides the experts of each layer, if there are any.
        grid: None if there is one replica.
    """

    every: dist.ProcessGroup | None = None
    sequence: SequenceGroup | None = None
    experts: ExpertGroup | None = None
    grid: Grid | None = None


class Ranks:
    """This process among `world` ranks; `Ranks()` is a trainer of one process.

    Args:
        store: where the ranks meet, needed if there are several.
        timeout_s: seconds that another rank may be silent.
        groups: in which they talk.
        heartbeat: how they wait for each other, needed if there are several.
        hosts: that they are on, if there are several.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        store: Store | None = None,
        timeout_s: float = 0.0,
        groups: Groups | None = None,
        heartbeat: Liveness | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank)) if world > 1 else 0
        self.store = store
        self.timeout_s = timeout_s
        self.hosts = hosts or Hosts(RankPlace(rank, world, world))
        self.grid = groups.grid if groups else None
        self.group = groups.every if groups else None
        self.experts = groups.experts if groups else None
        self.sequence = sequence = groups.sequence if groups else None
        # The first so many hold every row of the policy, one replica of it.
        self.holders = world // (self.grid.replicas if self.grid else 1)
        # Parts that a batch is cut into, and which of them is ours: ranks that share rows have one.
        self.shares = world // sequence.size if sequence else world
        self.share = rank // sequence.size if sequence else rank
        self._heartbeat = heartbeat
        self._heard = 0  # messages of rank 0

    def apart(self) -> Ranks:
        """The same ranks with a process group of their own; all of them have to call it.

        What happens in it may run beside what happens in the other, in another thread.
        """
        if self.world == 1:
            return self
        group = dist.new_group(timeout=timedelta(seconds=self.timeout_s))
        assert isinstance(group, dist.ProcessGroup), "all ranks are members"
        groups = _groups(
            self.hosts.place,
            self.timeout_s,
            sequence=self.sequence.size if self.sequence else 1,
            experts=self.experts.size if self.experts else 1,
            replicas=self.world // self.holders,
            every=group,
        )
        return Ranks(self.rank, self.world, None, self.timeout_s, groups, hosts=self.hosts)

    @property
    def node(self) -> int:
        """The number of the host that this rank is on."""
        return self.hosts.place.node(self.rank)

    @property
    def leads_host(self) -> bool:
        """True on the first rank of each host."""
        return self.rank == self.hosts.place.ranks_on(self.node)[0]

    @property
    def heartbeat(self) -> Liveness:
        """How these ranks wait for each other.

        Raises:
            ValueError: there is one rank.
        """
        if self._heartbeat is None:
            raise ValueError("a single rank waits for nobody")
        return self._heartbeat

    def check(self) -> None:
        """Rank 0, while it waits for something else: do the other ranks live?

        Raises:
            DeadlineError: one is silent.
        """
        if self.world > 1:
            self.heartbeat.check(self.world)

    def broadcast(self, data: bytes = b"") -> bytes:
        """What rank 0 gives as `data`, on every rank; they wait for it for as long as it lives.

        Raises:
            ValueError: more than `MAX_BYTES`.
            DeadlineError: rank 0 is silent.
            SystemExit: it has ended the trainer, and said why.
        """
        if self.world == 1:
            return data
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes for the other ranks: at most {MAX_BYTES}")
        store = self.store
        assert store is not None
        if self.rank == 0:
            store.add(_SAID, 1)
        else:
            self._heard += 1
            if not self.heartbeat.wait(0, self._said, "what is to be done"):
                log.info("rank 0 has ended the trainer: %s", store.get(_ENDED).decode())
                _leave(self)
                raise SystemExit(EXIT_DONE)
        return self.spread(data, 0)

    def spread(self, data: bytes, source: int) -> bytes:
        """What rank `source` gives as `data`, on every rank; all of them are there for it."""
        if self.world == 1:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, source)
        if not int(size):
            return b""
        if self.rank == source:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, source)
        return content.numpy().tobytes()

    def collect(self, data: bytes) -> list[bytes]:
        """What each rank gives as `data`, by rank, on every rank; it is small."""
        return [self.spread(data, rank) for rank in range(self.world)]

    def _said(self) -> bool | None:
        """True once rank 0's next message is announced, False if there will be none."""
        assert self.store is not None
        if self.store.add(_SAID, 0) >= self._heard:
            return True
        return False if self.store.check([_ENDED]) else None

    def agree(self, flag: bool) -> bool:
        """`flag` as rank 0 has it."""
        if self.world == 1:
            return flag
        value = torch.tensor([flag], dtype=torch.uint8)
        dist.broadcast(value, 0)
        return bool(value)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over the shares of a batch of a tensor on the CPU, in place.

        Ranks that share rows know the same of them, and the first speaks for all.
        """
        if self.sequence is not None and self.sequence.rank:
            tensor.zero_()
        return self.sum_ranks(tensor)

    def sum_ranks(self, tensor: Tensor) -> Tensor:
        """The same over all ranks, of what each knows of its own tokens or files alone."""
        if self.world > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """What is known of each share, on every rank: [...] on the CPU becomes [shares, ...]."""
        rows = tensor.new_zeros(self.shares, *tensor.shape)
        rows[self.share] = tensor
        return self.sum(rows)

    def gather_ranks(self, tensor: Tensor) -> Tensor:
        """What each rank knows, on every rank: [...] on the CPU becomes [world, ...]."""
        rows = tensor.new_zeros(self.world, *tensor.shape)
        rows[self.rank] = tensor
        return self.sum_ranks(rows)


@contextmanager
def join_ranks(
    config: TrainerConfig,
    listener: socket.socket | None = None,
    stopping: threading.Event | None = None,
) -> Iterator[Ranks]:
    """Meet the other ranks that torchrun, accelerate or `launch` started, if there are any.

    `listener` is where rank 0 waits for them, if `launch` started them.

    Raises:
        UsageError: another number of ranks than configured.
        PeerLostError: in the block or before: a rank is gone, or silent for too long.
        SystemExit: asked to stop before all were there.
    """
    place = RankPlace.of_environment()
    _check(config, place)
    if place.world == 1:
        yield Ranks()
        return
    if place.rank < 0:
        raise UsageError(
            f"WORLD_SIZE is {place.world}, but RANK is missing: start the ranks by torchrun, or by "
            "trainer.ranks and without WORLD_SIZE"
        )
    ranks: Ranks | None = None
    try:
        ranks = _meet(config, place, listener, stopping or threading.Event())
        yield ranks
        _leave(ranks)
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        first = str(error).strip().splitlines()[0]
        lost = f", {ranks.heartbeat.blame(place.world)}" if ranks is not None else ""
        raise PeerLostError(
            f"trainer rank {place.rank} lost another rank{lost}: it ended, or was silent for "
            f"{config.rank_timeout_s:g} s (trainer.rank_timeout_s): {first}"
        ) from error
    except UmbraError as error:
        if ranks is not None and ranks.rank == 0 and error.exit_code in FINAL_CODES:
            end(ranks, str(error))
        raise
    finally:
        if ranks is not None:
            ranks.heartbeat.close()
    dist.destroy_process_group()


def _check(config: TrainerConfig, place: RankPlace) -> None:
    """Refuse what was started otherwise than configured."""
    world = place.world
    if config.ranks not in (1, world):
        raise UsageError(
            f"trainer.ranks = {config.ranks}, but WORLD_SIZE is {world}: give torchrun or "
            "accelerate launch as many processes, or leave trainer.ranks at 1 there"
        )
    if config.nodes not in (1, place.nodes):
        raise UsageError(
            f"trainer.nodes = {config.nodes}, but by WORLD_SIZE = {world} and LOCAL_WORLD_SIZE = "
            f"{place.per_host} there are {place.nodes}: leave trainer.nodes at 1 under a launcher, "
            "or give it that number"
        )
    for key in ("sequence_parallel", "expert_parallel"):
        size = getattr(config, key)
        if world % size:
            raise UsageError(
                f"trainer.{key} = {size} does not divide the trainer's {world} ranks: change it, "
                "or trainer.ranks"
            )
        if place.per_host % size:
            raise UsageError(
                f"trainer.{key} = {size} does not divide the {place.per_host} ranks of each host, "
                "and ranks that share rows or divide experts have to be on one: change it, or "
                "start more ranks on a host"
            )
    if world % config.replicas:
        raise UsageError(
            f"trainer.replicas = {config.replicas} does not divide the trainer's {world} ranks: "
            "change it, or trainer.ranks"
        )
    if config.replicas > 1 and config.expert_parallel > 1:
        raise UsageError(
            "trainer.expert_parallel divides experts over all ranks, not within each of "
            f"trainer.replicas = {config.replicas}: set one of them to 1"
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise UsageError(
            "accelerate launch --use_fsdp: the trainer shards the policy by itself; leave it out"
        )


def _meet(
    config: TrainerConfig,
    place: RankPlace,
    listener: socket.socket | None,
    stopping: threading.Event,
) -> Ranks:
    rank, world = place.rank, place.world
    timeout = timedelta(seconds=config.rank_timeout_s)
    several = place.nodes > 1
    key = "rendezvous_timeout_s" if several else "rank_timeout_s"
    store, hosts = meet(place, getattr(config, key), f"trainer.{key}", listener, stopping.is_set)
    store.set_timeout(timeout)
    # Else gloo listens where this host's name points to, which others may not reach.
    towards = interface_towards(os.environ["MASTER_ADDR"])
    if towards and not (several and towards == "lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", towards)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", towards)
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    heartbeat = Liveness(
        PrefixStore("heartbeat", store), rank, config.rank_timeout_s, hosts.describe
    )
    groups = _groups(
        place,
        config.rank_timeout_s,
        sequence=config.sequence_parallel,
        experts=config.expert_parallel,
        replicas=config.replicas,
    )
    return Ranks(
        rank, world, PrefixStore("ranks", store), config.rank_timeout_s, groups, heartbeat, hosts
    )


def _groups(
    place: RankPlace,
    timeout_s: float,
    *,
    sequence: int,
    experts: int,
    replicas: int,
    every: dist.ProcessGroup | None = None,
) -> Groups:
    """The groups that `place.rank` is in, by the numbers of their ranks; all ranks make all."""
    rank, world = place.rank, place.world
    shared: SequenceGroup | None = None
    divided: ExpertGroup | None = None
    grid: Grid | None = None

    def neighbours(size: int) -> dist.ProcessGroup:
        groups = [range(first, first + size) for first in range(0, world, size)]
        return _own_group(rank, groups, timeout_s)

    def alike(size: int) -> dist.ProcessGroup:
        """Those at the same place among `size` neighbours."""
        return _own_group(rank, [range(at, world, size) for at in range(size)], timeout_s)

    if sequence > 1:
        from umbra.services.modeling.sequence_parallel import SequenceGroup

        shared = SequenceGroup(neighbours(sequence), rank % sequence, sequence)
    if experts > 1:
        from umbra.services.modeling.expert_parallel import ExpertGroup

        divided = ExpertGroup(neighbours(experts), alike(experts), rank % experts, experts)
    if replicas > 1:
        size = world // replicas
        grid = Grid(replicas, alike(size), neighbours(size))
    return Groups(every, shared, divided, grid)


def _own_group(rank: int, groups: list[range], timeout_s: float) -> dist.ProcessGroup:
    """That of `groups` in which `rank` is; all ranks make all of them, in this order."""
    timeout = timedelta(seconds=timeout_s)
    own: dist.ProcessGroup | None = None
    for members in groups:
        made = dist.new_group(list(members), timeout=timeout)
        if rank in members:
            assert isinstance(made, dist.ProcessGroup), "this rank is a member"
            own = made
    assert own is not None, "each rank is in one"
    return own


def end(ranks: Ranks, reason: str) -> None:
    """Rank 0: tell those that wait for something to do why there will be nothing.

    Else they would take it for lost, and their supervisors would start them again for nothing.
    """
    if ranks.store is not None:
        ranks.store.set(_ENDED, reason)
        _leave(ranks)


def _leave(ranks: Ranks) -> None:
    """Tell rank 0, which keeps the store, that it is not needed any more."""
    store = ranks.store
    assert store is not None
    if ranks.rank:
        store.set(f"{_LEFT}/{ranks.rank}", "")
        return
    others = [f"{_LEFT}/{rank}" for rank in range(1, ranks.world)]
    deadline = Deadline(LEAVE_S)
    while not store.check(others) and not deadline.passed:
        time.sleep(POLL_S)


def _is_lost(error: RuntimeError) -> bool:
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(sign in text for sign in _SIGNS)
