"""A receiver that halts in a phase of the push of a version, says so on stdout, and does no more.

Usage: halting_receiver.py ENDPOINT NAME PLANE VERSION
       idle|prepared|staging|received|staged|loaded|nowhere

Versions before VERSION are taken like any others; each is reported, with the checksum of its bytes.
A line on stdin has it go on, and halt no more.
"""

import sys
import threading

import xxhash
from fakes.hub_bench import Watched

from umbra.proto.net.io_thread import IoThread
from umbra.services.weights.receiver import Receiver

endpoint, name, plane, last, phase = sys.argv[1:]
released = threading.Event()


def halt(here: str, version: int) -> None:
    if here != phase or version < int(last) or released.is_set():
        return
    print(phase, flush=True)
    if not sys.stdin.readline():
        threading.Event().wait(3600)  # it is killed long before
    released.set()


link = IoThread(name, "halting")
receiver = Receiver(link.channel(endpoint, "hub"), Watched(plane, halt))
receiver.subscribe(600)
print("subscribed", flush=True)
while True:
    staged = receiver.wait_first(600, threading.Event())
    assert staged is not None
    halt("staged", staged.version)
    contents = xxhash.xxh3_64_hexdigest(bytes(staged.data))
    receiver.committed(staged, 0.0)
    halt("loaded", staged.version)
    print(staged.version, contents, flush=True)
    halt("idle", staged.version + 1)
