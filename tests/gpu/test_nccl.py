"""CuPy NCCL between two agent processes: correctness only, never bandwidth.

On one GPU both ranks share it: different values of NCCL_HOSTID make NCCL take them for two nodes,
so that they talk over sockets on the loopback interface. What is shown here is that bytes arrive,
that a dead peer is noticed, and that a new communicator can be built; nothing about speed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from umbra.proto.errors import DeadlineError, UmbraError
from umbra.services.runtime.arena import Arena
from umbra.services.weight_hub import nccl_plane
from umbra.services.weight_hub.agent_process import AgentProcess
from umbra.services.weight_hub.nccl_group import Facts, mismatch

WAIT_S = 60.0
SIZE, BUCKET = 8 << 20, 1 << 20
BUCKETS = [(start, start + BUCKET) for start in range(0, SIZE, BUCKET)]
ONE_GPU = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "4",
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        nccl_plane.nccl_unavailable() is not None, reason=str(nccl_plane.nccl_unavailable())
    ),
]


class Pair:
    """A sender and a receiver, each with an arena of its own."""

    def __init__(self) -> None:
        run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.agents = [AgentProcess(0, {**ONE_GPU, "NCCL_HOSTID": f"host{i}"}) for i in range(2)]
        self.arenas = [Arena.create(run_id, f"rank{i}", slot_bytes=SIZE, slots=2) for i in range(2)]
        for rank in range(2):
            self.attach(rank)

    def attach(self, rank: int) -> None:
        self.agents[rank].call(
            "attach",
            WAIT_S,
            path=str(self.arenas[rank].path),
            slot_bytes=SIZE,
            bucket_bytes=BUCKET,
        )

    def join(self, epoch: int) -> None:
        uid = self.agents[0].call("unique_id", WAIT_S)["uid"]
        for rank, agent in enumerate(self.agents):
            agent.order("join", epoch=epoch, uid=uid, rank=rank, size=2)
        for agent in self.agents:
            agent.answer(WAIT_S)

    def order(self, rank: int, epoch: int, deadline_s: float = 20.0) -> None:
        self.agents[rank].order(
            "transfer", epoch=epoch, slot=0, buckets=BUCKETS, deadline_s=deadline_s
        )

    def send(self, epoch: int) -> None:
        data = os.urandom(SIZE)
        self.arenas[0].slot(0)[:] = data
        for rank in range(2):
            self.order(rank, epoch)
        for agent in self.agents:
            agent.answer(WAIT_S)
        assert bytes(self.arenas[1].slot(0)) == data

    def close(self) -> None:
        for agent in self.agents:
            agent.kill()
        for arena in self.arenas:
            arena.unlink()
            arena.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_a_version_arrives_bit_for_bit(pair: Pair) -> None:
    ours, theirs = (Facts(**agent.call("facts", WAIT_S)["facts"]) for agent in pair.agents)
    assert mismatch(ours, theirs) is None
    pair.join(1)
    for _ in range(3):
        pair.send(1)


def test_a_killed_peer_is_noticed_and_another_takes_its_place(pair: Pair) -> None:
    """1. Two ranks, one is killed. 2. The other sends. 3. Both join again, in the next epoch."""
    pair.join(1)
    pair.send(1)
    pair.agents[1].kill()
    pair.order(0, 1, deadline_s=5.0)
    with pytest.raises(UmbraError, match=r"was not broadcast within|NCCL"):
        pair.agents[0].answer(WAIT_S)
    pair.attach(1)  # starts the new agent
    pair.join(2)
    pair.send(2)
    assert [agent.starts for agent in pair.agents] == [1, 2]


def test_a_join_whose_peer_never_comes_costs_the_agent_and_no_more(pair: Pair) -> None:
    uid = pair.agents[0].call("unique_id", WAIT_S)["uid"]
    with pytest.raises(DeadlineError, match="no answer from the NCCL agent"):
        pair.agents[0].call("join", 5.0, epoch=1, uid=uid, rank=0, size=2)
    pair.attach(0)
    pair.join(2)
    pair.send(2)
