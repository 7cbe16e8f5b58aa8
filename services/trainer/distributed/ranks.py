"""The ranks of a trainer: all run the same loop, in the environment that torchrun sets.

Rank 0 alone is a member of the run. What it leases and decides, and all else that ranks tell each
other on the CPU, goes through the control group in one order: a gloo group with a long deadline,
where the others wait while rank 0 waits for something else. Within a collective of the training
none may be silent for longer than `trainer.rank_timeout_s`; a rank that dies closes its
connections, which the others notice in the collective that they are in.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from umbra.proto.errors import PeerLostError, UmbraError, UsageError
from umbra.proto.sockets import interface_towards
from umbra.services.config import TrainerConfig
from umbra.services.modeling.experts import ExpertGroup
from umbra.services.modeling.sequence_parallel import SequenceGroup
from umbra.services.process.supervisor import FINAL_CODES
from umbra.services.trainer.distributed.heartbeat import RankHeartbeat
from umbra.services.trainer.distributed.rendezvous import RankPlace, meet

MAX_BYTES = 1 << 31  # of one message of rank 0
CONTROL_S = 4 * 3600.0  # that rank 0 may take, living, until its next message
# How torch's backends say that a peer is gone; they raise plain RuntimeErrors.
_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "broken pipe")

T = TypeVar("T")


class Ranks:
    """This process among all ranks, by its `place`; `Ranks()` is a trainer of one process.

    All ranks make theirs together, since each joins process groups: `sequence` neighbours share the
    tokens of each row, `experts` neighbours divide the experts of each layer. Rank 0's decisions
    are sent in the group `control`; None is the default one.
    """

    def __init__(
        self,
        place: RankPlace | None = None,
        timeout_s: float = 0.0,
        *,
        sequence: int = 1,
        experts: int = 1,
        control: dist.ProcessGroup | None = None,
    ) -> None:
        self.place, self.timeout_s = place or RankPlace(), timeout_s
        self.rank, self.world = rank, world = self.place.rank, self.place.world
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank)) if world > 1 else 0
        self.node = self.place.node(rank)
        self.leads_host = rank % self.place.per_host == 0
        # Parts that a batch is cut into, and which of them is ours: ranks that share rows have one.
        self.shares, self.share = world // sequence, rank // sequence
        self.sequence: SequenceGroup | None = None
        self.experts: ExpertGroup | None = None
        self._control = control
        if sequence > 1:
            self.sequence = SequenceGroup(self._near(sequence), rank % sequence, sequence)
        if experts > 1:
            peers = self._own([range(at, world, experts) for at in range(experts)])
            self.experts = ExpertGroup(self._near(experts), peers, rank % experts, experts)

    def _near(self, size: int) -> dist.ProcessGroup:
        return self._own([range(first, first + size) for first in range(0, self.world, size)])

    def _own(self, groups: list[range]) -> dist.ProcessGroup:
        """Return the member of `groups` that has this rank; all ranks make all of them."""
        handles = [new_group(self.timeout_s, list(members)) for members in groups]
        return next(h for h, members in zip(handles, groups, strict=True) if self.rank in members)

    def spread(self, value: T, kind: Any, source: int = 0) -> T:
        """Return on every rank the `value`, of a `kind` that msgspec decodes, of rank `source`.

        Raises ValueError if it has more than `MAX_BYTES`.
        """
        if self.world == 1:
            return value
        data = msgspec.msgpack.encode(value) if self.rank == source else b""
        if len(data) > MAX_BYTES:
            raise ValueError(f"{len(data)} bytes for the other ranks: at most {MAX_BYTES}")
        size = int(self.broadcast(torch.tensor([len(data)]), source))
        content = torch.frombuffer(bytearray(data or size), dtype=torch.uint8)
        return msgspec.msgpack.decode(self.broadcast(content, source).numpy().data, type=kind)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Fill a tensor on the CPU with the one of rank `source`, in place."""
        if self.world > 1 and tensor.numel():
            dist.broadcast(tensor, source, self._control)
        return tensor

    def collect(self, value: T, kind: Any) -> list[T]:
        """Return the small value of each rank, by rank, on every rank."""
        return [self.spread(value, kind, rank) for rank in range(self.world)]

    def agree(self, flag: bool) -> bool:
        """Return rank 0's `flag`."""
        return bool(self.broadcast(torch.tensor([flag], dtype=torch.uint8)))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor on the CPU over the shares of a batch, in place.

        Ranks that share rows know the same of them, and the first speaks for all.
        """
        if self.sequence is not None and self.sequence.rank:
            tensor.zero_()
        return self.sum_ranks(tensor)

    def sum_ranks(self, tensor: Tensor) -> Tensor:
        """Sum values of all ranks on the CPU."""
        if self.world > 1:
            dist.all_reduce(tensor, group=self._control)
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the values of all shares: [...] on the CPU becomes [shares, ...]."""
        rows = tensor.new_zeros(self.shares, *tensor.shape)
        rows[self.share] = tensor
        return self.sum(rows)


@contextmanager
def join_ranks(
    config: TrainerConfig,
    listener: socket.socket | None = None,
    stopping: threading.Event | None = None,
) -> Iterator[Ranks]:
    """Meet the other ranks that torchrun, accelerate or `launch` started, if there are any.

    `listener` is where rank 0 waits for them, if `launch` started them. In the block, the loss of a
    rank is a PeerLostError that names it.
    """
    place = RankPlace.of_environment()
    _check(config, place)
    if place.world == 1:
        yield Ranks()
        return
    store, place = _meet(config, place, listener, stopping or threading.Event())
    rank, timeout_s = place.rank, config.rank_timeout_s
    heartbeat = RankHeartbeat(PrefixStore("heartbeat", store), place, timeout_s)
    try:
        control = new_group(CONTROL_S, backend="gloo")
        sizes = {"sequence": config.sequence_parallel, "experts": config.expert_parallel}
        yield Ranks(place, timeout_s, control=control, **sizes)
        heartbeat.leave()
    except RuntimeError as error:
        is_lost = isinstance(error, dist.DistError)
        if not is_lost and not any(sign in str(error).lower() for sign in _SIGNS):
            raise
        first = str(error).strip().splitlines()[0]
        raise PeerLostError(
            f"trainer rank {rank} lost another rank, {heartbeat.lost()}: it ended, or was silent "
            f"for {timeout_s:g} s (trainer.rank_timeout_s): {first}"
        ) from error
    except UmbraError as error:
        if rank == 0 and error.exit_code in FINAL_CODES:
            heartbeat.end_all(str(error))
            heartbeat.leave()
        raise
    finally:
        heartbeat.close()
    dist.destroy_process_group()


def _check(config: TrainerConfig, place: RankPlace) -> None:
    """Refuse processes that were started otherwise than configured."""
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
    started = msgspec.structs.replace(config, ranks=world, nodes=place.nodes)
    if fault := next(started.rank_faults(), ""):
        raise UsageError(fault)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise UsageError(
            "accelerate launch --use_fsdp: the trainer shards the policy by itself; leave it out"
        )
    if place.rank < 0:
        raise UsageError(
            f"WORLD_SIZE is {world}, but RANK is missing: start the ranks by torchrun, or by "
            "trainer.ranks and without WORLD_SIZE"
        )


def _meet(
    config: TrainerConfig,
    place: RankPlace,
    listener: socket.socket | None,
    stopping: threading.Event,
) -> tuple[Store, RankPlace]:
    """Find the other ranks, and begin torch's process group with them."""
    timeout = timedelta(seconds=config.rank_timeout_s)
    several = place.nodes > 1
    key = "rendezvous_timeout_s" if several else "rank_timeout_s"
    store, place = meet(place, getattr(config, key), f"trainer.{key}", listener, stopping.is_set)
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
        rank=place.rank,
        world_size=place.world,
        timeout=timeout,
    )
    return store, place


def new_group(
    timeout_s: float, members: list[int] | None = None, backend: str | None = None
) -> Any:
    """Make a process group; all ranks call it, also those that are no members."""
    return dist.new_group(members, timeout=timedelta(seconds=timeout_s), backend=backend)
