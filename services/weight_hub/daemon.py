"""The weight daemon of a host: it holds versions in shared memory and hands them on.

Without an upstream it is the hub of a run: the trainer writes into its arena. With one it fetches
each version once for its host. With an owner as well, it holds the share of every version that the
ranks of one more trainer host write (`part.py`).
"""

from __future__ import annotations

import threading
import uuid
from contextlib import ExitStack

import msgspec
import zmq

from umbra.proto.net.address import reachable
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import OPEN, Security
from umbra.proto.net.server import Server
from umbra.proto.net.session import Session
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub
from umbra.services.weight_hub.upstream import UpstreamPlanes
from umbra.services.weights.planes.receiving import GpuReceiving
from umbra.services.weights.receiver import Receiver


class Daemon:
    """A daemon that serves receivers; `run` until it is told to stop.

    Args:
        name: in the run; with an upstream unique among all receivers of the hub.
        config: the section `weight_hub`.
        metrics: receives the rows of pushes.
        upstream: weights endpoint of the hub to fetch from; empty: the trainer publishes here.
        host: names the /dev/shm of this process; empty = find out.
        gpu: for plane `nccl` from upstream; closed with this.
        security: keys of this process.

    Raises:
        StartupError: the address is taken.
        UsageError: it is not ours, or other machines can reach it and there are no keys.
    """

    def __init__(
        self,
        name: str,
        config: WeightHubConfig,
        metrics: MetricsFile,
        *,
        upstream: str = "",
        host: str = "",
        gpu: GpuReceiving | None = None,
        security: Security = OPEN,
    ) -> None:
        security.check_bind(config.listen)
        self._name = name
        self._config = config
        self._metrics = metrics
        self._upstream = upstream
        self._host = host
        self._gpu = gpu
        self._security = security
        self.hub: WeightHub | None = None  # while it runs
        self._stack = ExitStack()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.term)
        self._server = Server(context, name, uuid.uuid4().hex[:12], security)
        self._stack.callback(self._server.close)
        with ExitStack() as failed:
            failed.push(self._stack)
            bound = self._server.bind(CHANNEL, config.listen, ACCEPTS)
            self.endpoint = reachable(bound)
            failed.pop_all()

    def run(
        self,
        run_id: str,
        stopping: threading.Event,
        patience_s: float,
        session: Session | None = None,
    ) -> None:
        """Serve until `stopping` is set; `session`, if there is one, is told the progress.

        Raises:
            UmbraError: the hub above does not answer within `patience_s` seconds, or refuses.
        """
        with self._stack as stack:
            metrics, security = self._metrics, self._security
            config = self._config
            if self._upstream:  # which chooses the plane of what comes
                config = msgspec.structs.replace(config, plane="auto")
            hub = WeightHub(self._server, run_id, config, metrics, self._host, self._upstream)
            self.hub = hub
            stack.callback(hub.close)
            receiver = None
            if self._upstream:
                link = IoThread(self._name, uuid.uuid4().hex[:12], security=security)
                stack.callback(link.close)
                planes = UpstreamPlanes(self._config, hub, self._gpu)
                receiver = Receiver(
                    link.channel(self._upstream, "weight hub", server="weight_hub"),
                    planes,
                    self._host,
                    serves=self.endpoint,
                    buckets=hub.planes.open_tcp().buckets,
                    load=planes.publish,
                )
                stack.callback(receiver.close)
                stack.callback(hub.leave)  # first: `receiver` may wait for its answer

                def waiting() -> None:
                    hub.step(0.0)
                    if session is not None:
                        session.progress("waiting for the weight hub", 0)

                if not receiver.subscribe_unless(stopping, patience_s, waiting):
                    return
            while not stopping.is_set():
                served = hub.step()
                if receiver is not None:
                    receiver.check()
                if session is not None:
                    held_back = bool(hub.protocol.held_back)
                    idle = "waiting for a part hub" if held_back else "waiting"
                    session.progress("serving" if served and not held_back else idle, 1)
                    session.stats(**hub.stats())

    def close(self) -> None:
        """Free the address, if it never ran."""
        self._stack.close()
