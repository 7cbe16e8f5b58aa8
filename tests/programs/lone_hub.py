"""A weight hub without a broker.

Usage: lone_hub.py ENDPOINT RUN_ID PLANE FOLDER

Prints its endpoint; ends at SIGTERM.
"""

import sys
import threading
from pathlib import Path

import zmq
from fakes.hub_bench import Bench

from umbra.services.process.command import stop_on_signals

endpoint, run_id, plane, folder = sys.argv[1:]
stopping = threading.Event()
with zmq.Context() as context:
    bench = Bench(context, run_id, Path(folder))
    bench.endpoint = endpoint
    with stop_on_signals(stopping):
        bench.start(plane=plane, delta="always", deadline_s=5.0)
        print(bench.endpoint, flush=True)
        stopping.wait()
    bench.close()
