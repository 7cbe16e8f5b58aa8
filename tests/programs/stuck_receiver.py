"""A receiver that subscribes, is told to stage a version, says so on stdout, and then does nothing.

Usage: stuck_receiver.py ENDPOINT NAME
"""

import sys
import threading

from umbra.proto.messages import Prepare, Subscribe, Subscribed
from umbra.proto.net.io_thread import IoThread
from umbra.services.weights.arena import shm_host

endpoint, name = sys.argv[1:]
channel = IoThread(name, "stuck").channel(endpoint, "weight hub")
channel.call(Subscribe(host=shm_host(), planes=["shm"]), Subscribed, timeout_s=600)
print("subscribed", flush=True)
message = channel.pushes.get(timeout=600)
assert isinstance(message, Prepare)
print("staging", flush=True)
threading.Event().wait(3600)  # it is killed long before
