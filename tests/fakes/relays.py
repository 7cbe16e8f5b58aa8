"""Weight daemons with an upstream, in threads of this process, under host names of their own."""

from __future__ import annotations

import threading
from typing import Any

from fakes.hub_bench import WAIT_S, Bench

from umbra.proto.net.keys import OPEN, Security
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.daemon import Daemon
from umbra.services.weights.planes.receiving import GpuReceiving


class Relay:
    """A daemon that fetches from the hub of `bench`."""

    def __init__(
        self,
        bench: Bench,
        name: str,
        *,
        security: Security = OPEN,
        gpu: GpuReceiving | None = None,
        **config: Any,
    ) -> None:
        self.metrics_path = bench.metrics_path.with_name(f"{name}.jsonl")
        self._metrics = MetricsFile(self.metrics_path, name)
        self.daemon = Daemon(
            name,
            bench.config(**config),
            self._metrics,
            upstream=bench.endpoint,
            host=name,
            gpu=gpu,
            security=security,
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.daemon.run, args=(name, self._stopping, WAIT_S))
        self._thread.start()
        bench.closers.append(self.stop)
        while name not in bench.hub.protocol.serving:
            self._thread.join(0.01)
            assert self._thread.is_alive(), f"no {name}"

    @property
    def buckets(self) -> str:
        assert self.daemon.hub is not None
        return self.daemon.hub.planes.open_tcp().buckets.endpoint

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S)
        self._metrics.close()
