"""A weight hub without a broker.

Usage: lone_hub.py ENDPOINT RUN_ID PLANE

Prints its endpoint; ends at SIGTERM.
"""

import sys
import threading
import uuid

import zmq

from umbra.proto.net.server import Server
from umbra.services.config import WeightHubConfig as WeightHubConfig
from umbra.services.process.command import stop_on_signals
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.service import ACCEPTS, CHANNEL, WeightHub

endpoint, run_id, plane = sys.argv[1:]
config = WeightHubConfig(deadline_s=5.0, delta="always", plane=plane)  # type: ignore[arg-type]
context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
server = Server(context, "weight-hub", uuid.uuid4().hex)
endpoint = server.bind(CHANNEL, endpoint, ACCEPTS)
hub = WeightHub(server, run_id, config, MetricsFile(None, "hub"))
stopping = threading.Event()
with stop_on_signals(stopping):
    print(endpoint, flush=True)
    while not stopping.is_set():
        hub.step(0.02)
hub.close()
server.close()
context.term()
