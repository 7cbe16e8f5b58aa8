"""The hub over `nccl` and `cuda_ipc` on a real GPU: from the trainer's tensors to the engine's.

Over `nccl` all ranks share the one GPU: correctness only, never bandwidth.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest
from fakes.gpu_world import hub_worker
from fakes.hub_bench import WAIT_S, Bench, publish_slot, take
from fakes.one_gpu import SHARED
from fakes.slowness import until

from umbra.proto.records import NcclRound
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.weights.gpu import cuda
from umbra.services.weights.gpu.worker import GpuWorkerProcess
from umbra.services.weights.manifest import build_manifest
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
BUCKET = 1 << 16


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
