"""CuPy NCCL between two worker processes on one GPU: correctness only, never bandwidth."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
from fakes.one_gpu import rank_environment

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import DeadlineError, UmbraError
from umbra.proto.records import GpuFacts
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu import cuda
from umbra.services.weights.gpu.worker import GpuWorkerProcess, result
from umbra.services.weights.planes.plane import mismatch

WAIT_S = 60.0
# More than NCCL's own queues and the sockets' buffers hold: else a send ends without a receiver.
SIZE, CHUNK = 256 << 20, 16 << 20

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(cuda.nccl_unavailable() is not None, reason=str(cuda.nccl_unavailable())),
]


class Pair:
    def __init__(self) -> None:
        run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.workers = [GpuWorkerProcess(0, rank_environment(f"host{rank}")) for rank in range(2)]
        self.arenas = [Arena.create(run_id, f"rank{i}", slot_bytes=SIZE, slots=2) for i in range(2)]
        for worker, arena in zip(self.workers, self.arenas, strict=True):
            worker.use(arena, CHUNK, Pace(WAIT_S, LEAST_RATE))

    def order(self, rank: int, epoch: int, deadline_s: float = 20.0) -> None:
        self.workers[rank].order("transfer", epoch=epoch, slot=0, deadline_s=deadline_s)

    def join(self, epoch: int) -> None:
        """Join as the ranks of `epoch`, and send a version."""
        for worker in self.workers:
            result(worker.attached())
        uid = self.workers[0].call("unique_id", WAIT_S)["uid"]
        for rank, worker in enumerate(self.workers):
            worker.order("join", epoch=epoch, uid=uid, rank=rank, size=2)
        for worker in self.workers:
            result(worker.answer(WAIT_S))
        self.send(epoch)

    def send(self, epoch: int) -> None:
        data = os.urandom(SIZE)
        self.arenas[0].slot(0)[:] = data
        for rank in range(2):
            self.order(rank, epoch)
        for worker in self.workers:
            result(worker.answer(WAIT_S))
        assert bytes(self.arenas[1].slot(0)) == data

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        for arena in self.arenas:
            arena.unlink()
            arena.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair()) as pair:
        yield pair


def test_a_version_arrives_bit_for_bit(pair: Pair) -> None:
    pair.join(1)
    pair.send(1)
    pair.send(1)
    ours, theirs = (
        msgspec.convert(worker.call("facts", WAIT_S)["facts"], GpuFacts) for worker in pair.workers
    )
    assert mismatch(ours, theirs) is None


def test_a_killed_peer_is_noticed_and_another_takes_its_place(pair: Pair) -> None:
    """1. Two ranks, one is killed. 2. The other sends. 3. Both join again, in the next epoch."""
    pair.join(1)
    pair.workers[1].kill()
    pair.order(0, 1, deadline_s=5.0)
    with pytest.raises(UmbraError, match=r"was not broadcast within|NCCL"):
        result(pair.workers[0].answer(WAIT_S))
    pair.join(2)
    starts = [worker.starts for worker in pair.workers]
    assert starts == [1, 2], "an abort was enough for the living"


def test_a_peer_that_is_killed_in_the_middle_of_a_broadcast(pair: Pair) -> None:
    """The sender has begun, the receiver dies without having taken part."""
    pair.join(1)
    pair.order(0, 1, deadline_s=5.0)
    with pytest.raises(DeadlineError):
        result(pair.workers[0].answer(1.0))  # it waits for the receiver; that kills it as well
    pair.workers[1].kill()
    pair.join(2)


def test_an_owner_can_abort_what_is_under_way(pair: Pair) -> None:
    pair.join(1)
    pair.order(0, 1, deadline_s=60.0)
    with pytest.raises(UmbraError, match="interrupted"):
        result(pair.workers[0].answer(WAIT_S), lambda: True)
    pair.workers[1].kill()
    pair.join(2)
    assert pair.workers[0].starts == 1


def test_a_join_whose_peer_never_comes_costs_the_agent_and_no_more(pair: Pair) -> None:
    result(pair.workers[0].attached())
    uid = pair.workers[0].call("unique_id", WAIT_S)["uid"]
    with pytest.raises(DeadlineError, match="no answer from the GPU worker"):
        pair.workers[0].call("join", 5.0, epoch=1, uid=uid, rank=0, size=2)
    pair.join(2)
