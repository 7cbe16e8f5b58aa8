"""A receiver that halts in a phase of the push of a version, says so on stdout, and does no more.

Usage: halting_receiver.py ENDPOINT NAME PLANE VERSION idle|prepared|staging|staged|loaded

Versions before VERSION are taken like any others; each is reported.
"""

import sys
import threading
from collections.abc import Callable

from umbra.proto.messages import Prepare, Subscribed
from umbra.services.runtime.net.io_thread import IoThread
from umbra.services.runtime.weights.plane_reader import ArenaReader, PlaneReader, ReadResult
from umbra.services.runtime.weights.receiver import Receiver
from umbra.services.runtime.weights.tcp_reader import TcpReader

endpoint, name, plane, last, phase = sys.argv[1:]


def halt() -> None:
    """Say where, and stay there."""
    print(phase, flush=True)
    threading.Event().wait(3600)  # it is killed long before


class Halting:
    """An intake that halts before, in, or after its work."""

    def __init__(self, reply: Subscribed) -> None:
        size = reply.manifest.total_bytes
        buffers = [memoryview(bytearray(size)) for _ in range(2)]
        self._halts = False
        self._real: PlaneReader = (
            TcpReader(name, reply.manifest, buffers, 4096, arrived=self._arrived)
            if plane == "tcp"
            else ArenaReader(reply.path, reply.manifest, buffers)
        )

    def take(self, message: Prepare, target: int, interrupted: Callable[[], bool]) -> ReadResult:
        """Take a version."""
        self._halts = message.version >= int(last)
        if self._halts and phase == "prepared":
            halt()
        done = self._real.take(message, target, interrupted)
        if self._halts and phase == "staging":
            halt()  # over shared memory there is no event in between
        return done

    def close(self) -> None:
        """Let go."""
        self._real.close()

    def _arrived(self, _bucket: int) -> None:
        if self._halts and phase == "staging":
            halt()


link = IoThread(name, "halting")
receiver = Receiver(link.channel(endpoint, "hub"), planes=[plane], open_intake=Halting)
receiver.subscribe(20)
print("subscribed", flush=True)
never = threading.Event()
while True:
    staged = receiver.wait_first(60, never)
    assert staged is not None
    if staged.version >= int(last) and phase == "staged":
        halt()
    receiver.committed(staged, 0.0)
    if staged.version >= int(last) and phase == "loaded":
        halt()
    print(staged.version, flush=True)
    if staged.version + 1 >= int(last) and phase == "idle":
        halt()
