"""A machine with fake GPUs: the hub's, relays' and receivers' workers are real processes."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.hub_bench import LAYOUT, Bench
from fakes.slowness import seconds, until

from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.weights.gpu import cuda
from umbra.services.weights.planes.cuda_ipc import IpcHub
from umbra.services.weights.planes.nccl import NcclHub
from umbra.services.weights.planes.receiving import GpuReceiving, StagedPlanes, find_gpu
from umbra.services.weights.receiver import Receiver

DOUBLE = Path(__file__).parent / "cuda_double"
CHUNK = 4096
TOTAL = LAYOUT.total_bytes


class GpuWorld:
    """Receivers on fake GPUs around a hub; `deadline_s` is the hub's."""

    def __init__(self, bench: Bench, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.folder = folder
        self._patch = patch
        patch.setattr(WeightHubConfig, "chunk_bytes", CHUNK)
        # Before the threads of hub and test both do.
        self.runtime, self.nccl = map(
            importlib.import_module, ("cupy.cuda.runtime", "cupy.cuda.nccl")
        )
        self.gpus: dict[str, GpuReceiving] = {}

    def start(self, plane: str, **config: Any) -> None:
        options: dict[str, Any] = {"deadline_s": seconds(8.0), **config}
        self.bench.start(plane=plane, **options)

    def gpu(
        self,
        name: str,
        plane: str = "auto",
        device: int = 0,
        planes: tuple[str, ...] = ("cuda_ipc", "nccl"),
        loads: bool = False,
        **environ: str,
    ) -> GpuReceiving:
        """The GPU of a receiver, whose engine `loads` from it; its worker has `environ`."""
        with self._patch.context() as patch:
            for key, value in {"FAKE_CUDA_NAME": name, **environ}.items():
                patch.setenv(key, value)
            config = msgspec.convert({"plane": plane}, WeightHubConfig)
            found = find_gpu(config, planes, device, loads=loads)
        assert found is not None
        self.gpus[name] = found
        self.bench.closers.append(found.close)
        return found

    def receiver(
        self, name: str, plane: str, planes: tuple[str, ...] = (), *, host: str = "", **gpu: Any
    ) -> Receiver:
        """A subscribed receiver that offers `plane`, and `planes` without a GPU."""
        offered = StagedPlanes(planes, gpu=self.gpu(name, plane, **gpu))
        return self.bench.receiver(name, offered, host)

    def rows(self, count: int) -> list[dict[str, object]]:
        """The rows of the hub's metrics, when there are `count`."""
        until(lambda: len(self.bench.rows()) >= count, f"{count} rows")
        return self.bench.rows()

    def row_of(self, version: int, receiver: Receiver) -> dict[str, object]:
        """The hub's row of the only receiver's load of `version`, when there is one.

        Who was dropped may subscribe twice, and then its first word of a load counts no more: so
        it loads what it is pushed until then, as an engine does.
        """

        def found() -> dict[str, object] | None:
            if (staged := receiver.poll()) is not None:
                receiver.committed(staged, 0.0)
            return next((row for row in self.bench.rows() if row["version"] == version), None)

        return until(found, f"a row of version {version}")

    def leave(self, name: str) -> None:
        self.bench.links[name].close()

    def fault(self, what: str) -> None:
        (self.folder / what).touch()

    def await_file(self, name: str) -> None:
        until((self.folder / name).exists, name)

    @property
    def opened(self) -> list[str]:
        """Files of the device memory that was mapped from another process, in that order."""
        return (self.folder / "ipc-opened").read_text().split()[1::2]

    @property
    def communicators(self) -> list[tuple[str, ...]]:
        """Who was in each communicator that came about, in the order of their making."""
        members: dict[str, dict[int, str]] = {}
        path = self.folder / "communicators"
        for line in path.read_text().splitlines() if path.exists() else []:
            name, uid, rank = line.split()
            members.setdefault(uid, {})[int(rank)] = name
        return [tuple(ranks[rank] for rank in sorted(ranks)) for ranks in members.values()]


def hub_worker(bench: Bench, plane: str) -> int:
    for end in bench.hub.planes.ends.values():
        if isinstance(end, IpcHub | NcclHub) and end.plane == plane and end.worker.pid:
            return end.worker.pid
    raise AssertionError(f"no worker runs for {plane}")


def kill_worker(gpu: GpuReceiving) -> None:
    pid = gpu.worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def gpu_world(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuWorld]:
    folder = tmp_path / "gpu"
    folder.mkdir()
    paths = [str(DOUBLE), str(DOUBLE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("FAKE_CUDA_DIR", str(folder))
    monkeypatch.setenv("FAKE_CUDA_NAME", "hub")
    monkeypatch.setenv("FAKE_CUDA_DELAYS", "0.002,0.0005")  # copies, collectives
    monkeypatch.syspath_prepend(str(DOUBLE))
    _forget_cupy()
    yield GpuWorld(bench, folder, monkeypatch)
    bench.close()
    bench.closers.clear()
    _forget_cupy()


def _forget_cupy() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        del sys.modules[name]
    cuda.cuda_unavailable.cache_clear()
    cuda.nccl_unavailable.cache_clear()
