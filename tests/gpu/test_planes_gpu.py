"""Planes `nccl` and `cuda_ipc` on a real GPU: the workers, and the hub from trainer to engine.

Over `nccl` all ranks share the one GPU: correctness only, never bandwidth. Between two processes
`cuda_ipc` has its real path, and its bandwidth means something.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from fakes.gpu_world import hub_worker
from fakes.hub_bench import WAIT_S, Bench, publish_slot, take
from fakes.one_gpu import SHARED, rank_environment
from fakes.slowness import until
from programs import ipc_peer

from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import DeadlineError, UmbraError
from umbra.proto.records import GpuFacts, NcclRound
from umbra.services.config import WeightHubConfig
from umbra.services.weights.arena import Arena
from umbra.services.weights.gpu import cuda
from umbra.services.weights.gpu.worker import GpuWorkerProcess, result
from umbra.services.weights.manifest import build_manifest, checksum
from umbra.services.weights.memory import private_memory
from umbra.services.weights.planes.plane import mismatch
from umbra.services.weights.planes.receiving import StagedPlanes, find_gpu
from umbra.services.weights.publisher import Publisher

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from umbra.services.modeling.models import load_model  # noqa: E402
from umbra.services.modeling.weights import WeightTable, tensors_in  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(cuda.nccl_unavailable() is not None, reason=str(cuda.nccl_unavailable())),
]
IPC_BYTES, PASSES = 1 << 30, 10
SHARE = 0.8  # of the bandwidth of a copy inside of one process
ANSWER_S = 60.0
# More than NCCL's own queues and the sockets' buffers hold: else a send ends without a receiver.
NCCL_BYTES, CHUNK = 256 << 20, 16 << 20
BUCKET = 1 << 16


def test_the_other_process_copies_the_same_bytes_nearly_as_fast() -> None:
    device = cuda.Device(0)
    memory = private_memory(IPC_BYTES)
    memory[:] = os.urandom(1 << 20) * (IPC_BYTES >> 20)
    host = device.pin(memory)
    ours, other = device.allocate(IPC_BYTES), device.allocate(IPC_BYTES)
    try:
        device.to_device(ours, host, IPC_BYTES)
        device.copies.synchronize()
        floor = ipc_peer.fastest_copy(device, other, ours, IPC_BYTES, PASSES)
        told = device.export(ours).hex(), str(IPC_BYTES), str(PASSES)
        done = subprocess.run(
            [sys.executable, ipc_peer.__file__, *told],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        device.unpin(host)
        device.free(ours)
        device.free(other)
    seconds, found = done.stdout.split()
    gb = IPC_BYTES / 1e9
    print(f"device to device {gb / floor:.0f} GB/s, IPC {gb / float(seconds):.0f}")
    assert int(found) == checksum(memory)
    assert floor / float(seconds) >= SHARE


class Pair:
    def __init__(self) -> None:
        run_id = f"test-{uuid.uuid4().hex[:8]}"
        self.workers = [GpuWorkerProcess(0, rank_environment(f"host{rank}")) for rank in range(2)]
        self.arenas = [
            Arena.create(run_id, f"rank{i}", slot_bytes=NCCL_BYTES, slots=2) for i in range(2)
        ]
        for worker, arena in zip(self.workers, self.arenas, strict=True):
            worker.use(arena, CHUNK, Pace(ANSWER_S, LEAST_RATE))

    def order(self, rank: int, epoch: int, deadline_s: float = 20.0) -> None:
        self.workers[rank].order("transfer", epoch=epoch, slot=0, deadline_s=deadline_s)

    def join(self, epoch: int) -> None:
        """Join as the ranks of `epoch`, and send a version."""
        for worker in self.workers:
            result(worker.attached())
        uid = self.workers[0].call("unique_id", ANSWER_S)["uid"]
        for rank, worker in enumerate(self.workers):
            worker.order("join", epoch=epoch, uid=uid, rank=rank, size=2)
        for worker in self.workers:
            result(worker.answer(ANSWER_S))
        self.send(epoch)

    def send(self, epoch: int) -> None:
        data = os.urandom(NCCL_BYTES)
        self.arenas[0].slot(0)[:] = data
        for rank in range(2):
            self.order(rank, epoch)
        for worker in self.workers:
            result(worker.answer(ANSWER_S))
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
        msgspec.convert(worker.call("facts", ANSWER_S)["facts"], GpuFacts)
        for worker in pair.workers
    )
    assert mismatch(ours, theirs) is None


def test_a_killed_peer_is_noticed_and_another_takes_its_place(pair: Pair) -> None:
    """1. Two ranks, one is killed. 2. The other sends. 3. Both join again, in the next epoch."""
    pair.join(1)
    pair.workers[1].kill()
    pair.order(0, 1, deadline_s=5.0)
    with pytest.raises(UmbraError, match=r"was not broadcast within|NCCL"):
        result(pair.workers[0].answer(ANSWER_S))
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
        result(pair.workers[0].answer(ANSWER_S), lambda: True)
    pair.workers[1].kill()
    pair.join(2)
    assert pair.workers[0].starts == 1


def test_a_join_whose_peer_never_comes_costs_the_agent_and_no_more(pair: Pair) -> None:
    result(pair.workers[0].attached())
    uid = pair.workers[0].call("unique_id", ANSWER_S)["uid"]
    with pytest.raises(DeadlineError, match="no answer from the GPU worker"):
        pair.workers[0].call("join", 5.0, epoch=1, uid=uid, rank=0, size=2)
    pair.join(2)


class Models:
    """One that is trained and those that are served, all of the same layout."""

    def __init__(self, path: Path, bench: Bench) -> None:
        self._path = path
        self.trained = load_model(str(path), torch.device("cuda", 0), torch.float32)
        names = dict(self.trained.named_parameters())
        self.manifest = build_manifest(
            [(name, "F32", list(tensor.shape)) for name, tensor in names.items()], BUCKET
        )
        self.publisher = Publisher(bench.channel("trainer"), self.manifest)
        bench.closers.append(self.publisher.close)
        self.publisher.register(WAIT_S)
        self.version = -1

    def publish(self) -> None:
        self.version += 1
        with torch.no_grad():
            for parameter in self.trained.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01)
        slot = self.publisher.slot(self.version, WAIT_S)
        places = dict(tensors_in(self.manifest, slot))
        for name, parameter in self.trained.named_parameters():
            places[name].copy_(parameter.detach())
        publish_slot(self.publisher, self.version)


class Engine:
    """A served model with its receiver; `name` tells NCCL's ranks apart."""

    def __init__(self, models: Models, bench: Bench, name: str, plane: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NCCL_HOSTID", name)
            config = msgspec.convert({"plane": plane}, WeightHubConfig)
            gpu = find_gpu(config, ["cuda_ipc", "nccl"], 0, loads=True)
        assert gpu is not None
        self._models = models
        self._model = load_model(str(models._path), torch.device("cuda", 0), torch.float32)
        self._table = WeightTable(self._model)
        self.receiver = bench.receiver(name, StagedPlanes(gpu=gpu), check_s=0.5)

    def load(self) -> None:
        """Load versions until the newest; then all weights are the trainer's, bit for bit."""
        version = -1
        while version != self._models.version:
            staged = take(self.receiver)
            version = staged.version
            self._table.load(staged.manifest, staged.data)
            torch.cuda.synchronize()
            self.receiver.committed(staged, 0.0)
        ours = dict(self._model.named_parameters())
        for name, parameter in self._models.trained.named_parameters():
            assert torch.equal(ours[name], parameter), name


@pytest.fixture
def world(
    bench: Bench, tiny_model_dir: Path, plane: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Models, Engine]:
    for name, value in {**SHARED, "NCCL_HOSTID": "hub"}.items():
        monkeypatch.setenv(name, value)
    bench.start(plane=plane, deadline_s=60.0)
    models = Models(tiny_model_dir, bench)
    return models, Engine(models, bench, "gen-0", plane)


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The epoch of each broadcast that was received; what was fetched instead is not in it."""
    received: list[int] = []
    broadcast = GpuWorkerProcess.broadcast

    def noted(
        self: GpuWorkerProcess, group: NcclRound, slot: int, limit_s: float
    ) -> Generator[None, None, None]:
        yield from broadcast(self, group, slot, limit_s)
        if group.rank:  # not the hub
            received.append(group.epoch)

    monkeypatch.setattr(GpuWorkerProcess, "broadcast", noted)
    return received


@pytest.mark.parametrize("plane", ["nccl", "cuda_ipc"])
def test_the_engines_weights_are_the_trainers(
    bench: Bench, broadcasts: list[int], world: tuple[Models, Engine], plane: str
) -> None:
    models, engine = world
    for _ in range(4):
        models.publish()
        engine.load()
    until(lambda: len(bench.rows()) >= 4, "4 rows")
    rows = bench.rows()
    assert {row["plane"] for row in rows} == {plane}
    # The first version may come while the hub's GPU process still starts: then it is fetched.
    assert len(broadcasts) >= (3 if plane == "nccl" else 0)
    assert all(row["wire_bytes"] == row["bytes"] for row in rows)
    assert bench.hub.protocol.counters["failed"] == 0


@pytest.mark.parametrize("plane", ["nccl", "cuda_ipc"])
def test_an_agent_that_is_killed_costs_one_attempt(
    bench: Bench, world: tuple[Models, Engine], plane: str
) -> None:
    """The hub's worker dies between two versions: the next two arrive, whole."""
    models, engine = world
    models.publish()
    engine.load()
    os.kill(hub_worker(bench, plane), signal.SIGKILL)
    for _ in range(2):
        models.publish()
        engine.load()
    assert bench.hub.protocol.counters["dropped"] == 0
