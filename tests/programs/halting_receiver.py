"""A receiver that halts in a phase of the push of a version, says so on stdout, and does no more.

Usage: halting_receiver.py ENDPOINT NAME PLANE VERSION
       idle|prepared|staging|received|staged|loaded|nowhere

Versions before VERSION are taken like any others; each is reported, with the checksum of its bytes.
A line on stdin has it go on, and halt no more.
"""

import sys
import threading

import xxhash

from umbra.proto.messages import Prepare, Subscribed
from umbra.proto.net.io_thread import IoThread
from umbra.proto.net.keys import Security
from umbra.services.config import WeightHubConfig
from umbra.services.weights.planes.plane import ReceiverEnd, Receiving
from umbra.services.weights.planes.receiving import StagedPlanes
from umbra.services.weights.receiver import Receiver

endpoint, name, plane, last, phase = sys.argv[1:]
released = threading.Event()


def halt() -> None:
    if released.is_set():
        return
    print(phase, flush=True)
    if not sys.stdin.readline():
        threading.Event().wait(3600)  # it is killed long before
    released.set()


class Halting(StagedPlanes):
    """Planes whose ends halt before, in, or after their work."""

    def open(self, reply: Subscribed, security: Security) -> ReceiverEnd:
        """See `StagedPlanes.open`."""
        return HaltingEnd(super().open(reply, security))


class HaltingEnd:
    def __init__(self, real: ReceiverEnd) -> None:
        self.close = real.close
        self._real = real

    def receive(self, message: Prepare) -> Receiving:
        halts = message.version >= int(last)
        if halts and phase == "prepared":
            halt()
        steps = self._real.receive(message)
        while True:
            try:
                bucket = next(steps)
            except StopIteration as end:
                if halts and phase == "received":
                    halt()
                return end.value
            if halts and phase == "staging" and bucket is not None:
                halt()
            yield bucket


link = IoThread(name, "halting")
receiver = Receiver(
    link.channel(endpoint, "hub"),
    Halting([plane], config=WeightHubConfig(receive_bucket_bytes=4096)),
)
receiver.subscribe(600)
print("subscribed", flush=True)
never = threading.Event()
while True:
    staged = receiver.wait_first(600, never)
    assert staged is not None
    if staged.version >= int(last) and phase == "staged":
        halt()
    contents = xxhash.xxh3_64_hexdigest(bytes(staged.data))
    receiver.committed(staged, 0.0)
    if staged.version >= int(last) and phase == "loaded":
        halt()
    print(staged.version, contents, flush=True)
    if staged.version + 1 >= int(last) and phase == "idle":
        halt()
