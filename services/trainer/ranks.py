"""The ranks of a trainer: rank 0 leads, and all do the same things in the same order.

Rank 0 alone is a member of the run. What it decides reaches the others as bytes over the process
group, which they enter when it has announced them: until then they wait for as long as it lives
(`pulse.py`). A rank that dies closes its connections, which the others notice in the collective
that they are in, or in the next one; within a collective none may be silent for longer than
`trainer.rank_timeout_s`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from umbra.proto.errors import PeerLostError, UsageError
from umbra.services.runtime.config import TrainerConfig
from umbra.services.runtime.deadline import Deadline
from umbra.services.trainer.pulse import POLL_S, Pulse

if TYPE_CHECKING:
    from umbra.services.modeling.expert_parallel import ExpertGroup
    from umbra.services.modeling.sequence_parallel import SequenceGroup

MAX_BYTES = 1 << 31  # of one message of rank 0
LEAVE_S = 3.0  # that rank 0 keeps the store for others that are about to leave
# How torch's backends say that a peer is gone; they raise plain RuntimeErrors.
_SAID, _LEFT = "said", "left"  # in the store: messages of rank 0 so far, who is done
_SIGNS = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "broken pipe")


class Ranks:
    """This process among `world` ranks; `Ranks()` is a trainer of one process.

    Args:
        store: where the ranks meet, needed if there are several.
        timeout_s: seconds that another rank may be silent.
        group: None is the one of all ranks.
        pulse: how they wait for each other, needed if there are several.
        sequence: the ranks with which this one shares the tokens of each row, if there are any.
        experts: those with which it divides the experts of each layer, if there are any.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        store: Store | None = None,
        timeout_s: float = 0.0,
        group: dist.ProcessGroup | None = None,
        pulse: Pulse | None = None,
        sequence: SequenceGroup | None = None,
        experts: ExpertGroup | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank)) if world > 1 else 0
        self.store = store
        self.timeout_s = timeout_s
        self.group = group
        self.sequence = sequence
        self.experts = experts
        # Parts that a batch is cut into, and which of them is ours: ranks that share rows have one.
        self.shares = world // sequence.size if sequence else world
        self.share = rank // sequence.size if sequence else rank
        self._pulse = pulse
        self._heard = 0  # messages of rank 0

    def apart(self) -> Ranks:
        """The same ranks with a process group of their own; all of them have to call it.

        What happens in it may run beside what happens in the other, in another thread.
        """
        if self.world == 1:
            return self
        group = dist.new_group(timeout=timedelta(seconds=self.timeout_s))
        assert isinstance(group, dist.ProcessGroup), "all ranks are members"
        sequence, experts = _groups(
            self.rank,
            self.world,
            self.timeout_s,
            self.sequence.size if self.sequence else 1,
            self.experts.size if self.experts else 1,
        )
        return Ranks(
            self.rank,
            self.world,
            None,
            self.timeout_s,
            group,
            sequence=sequence,
            experts=experts,
        )

    @property
    def pulse(self) -> Pulse:
        """How these ranks wait for each other.

        Raises:
            ValueError: there is one rank.
        """
        if self._pulse is None:
            raise ValueError("a single rank waits for nobody")
        return self._pulse

    def broadcast(self, data: bytes = b"") -> bytes:
        """What rank 0 gives as `data`, on every rank; they wait for it for as long as it lives.

        Raises:
            ValueError: more than `MAX_BYTES`.
            DeadlineError: rank 0 is silent.
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
            self.pulse.wait(0, self._said, "what is to be done")
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            content = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(content, 0)
        return content.numpy().tobytes()

    def _said(self) -> int | None:
        """Messages of rank 0, once the next one is announced."""
        assert self.store is not None
        said = self.store.add(_SAID, 0)
        return said if said >= self._heard else None

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


@contextmanager
def join_ranks(config: TrainerConfig, listener: socket.socket | None = None) -> Iterator[Ranks]:
    """Meet the other ranks that torchrun, accelerate or `launch` started, if there are any.

    `listener` is where rank 0 waits for them, if `launch` started them.

    Raises:
        UsageError: another number of ranks than configured.
        PeerLostError: in the block or before: a rank is gone, or silent for too long.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if config.ranks not in (1, world):
        raise UsageError(
            f"trainer.ranks = {config.ranks}, but WORLD_SIZE is {world}: give torchrun or "
            "accelerate launch as many processes, or leave trainer.ranks at 1 there"
        )
    for key in ("sequence_parallel", "expert_parallel"):
        if world % getattr(config, key):
            raise UsageError(
                f"trainer.{key} = {getattr(config, key)} does not divide the trainer's {world} "
                "ranks: change it, or trainer.ranks"
            )
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        raise UsageError(
            "accelerate launch --use_fsdp: the trainer shards the policy by itself; leave it out"
        )
    if world == 1:
        yield Ranks()
        return
    try:
        ranks = _meet(config, world, listener)
        with closing(ranks.pulse):
            yield ranks
        _leave(ranks)
    except RuntimeError as error:
        if not _is_lost(error):
            raise
        first = str(error).strip().splitlines()[0]
        raise PeerLostError(
            f"trainer rank {os.environ['RANK']} lost another rank: it ended, or was silent for "
            f"{config.rank_timeout_s:g} s (trainer.rank_timeout_s): {first}"
        ) from error
    dist.destroy_process_group()


def _meet(config: TrainerConfig, world: int, listener: socket.socket | None) -> Ranks:
    rank = int(os.environ["RANK"])
    timeout = timedelta(seconds=config.rank_timeout_s)
    if listener is not None:
        host, port = listener.getsockname()
        store: Store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            port,
            world,
            is_master=True,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    else:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    pulse = Pulse(PrefixStore("pulse", store), rank, config.rank_timeout_s)
    sequence, experts = _groups(
        rank, world, config.rank_timeout_s, config.sequence_parallel, config.expert_parallel
    )
    return Ranks(
        rank,
        world,
        PrefixStore("ranks", store),
        config.rank_timeout_s,
        pulse=pulse,
        sequence=sequence,
        experts=experts,
    )


def _groups(
    rank: int, world: int, timeout_s: float, sequence: int, experts: int
) -> tuple[SequenceGroup | None, ExpertGroup | None]:
    """The neighbours that share rows with `rank`, and those that divide experts, by their number.

    All ranks make all groups.
    """
    shared: SequenceGroup | None = None
    divided: ExpertGroup | None = None
    if sequence > 1:
        from umbra.services.modeling.sequence_parallel import SequenceGroup

        own = _own_group(rank, world, timeout_s, sequence)
        shared = SequenceGroup(own, rank % sequence, sequence)
    if experts > 1:
        from umbra.services.modeling.expert_parallel import ExpertGroup

        own = _own_group(rank, world, timeout_s, experts)
        alike = _own_group(rank, world, timeout_s, experts, apart=True)
        divided = ExpertGroup(own, alike, rank % experts, experts)
    return shared, divided


def _own_group(
    rank: int, world: int, timeout_s: float, size: int, *, apart: bool = False
) -> dist.ProcessGroup:
    """That of the `size` neighbours of `rank`; or, `apart`, of those at its place among theirs."""
    neighbours = [list(range(first, first + size)) for first in range(0, world, size)]
    members = [list(some) for some in zip(*neighbours, strict=True)] if apart else neighbours
    timeout = timedelta(seconds=timeout_s)
    groups = [dist.new_group(some, timeout=timeout) for some in members]
    own = groups[rank % size if apart else rank // size]
    assert isinstance(own, dist.ProcessGroup), "this rank is a member"
    return own


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
