"""Maps another process's device memory (handle in hex, size, passes), copies it, says how fast.

Prints the seconds of the best pass, and the xxh3 of what was copied.
"""

from __future__ import annotations

import sys
import time

from umbra.services.weights.gpu.cuda import Device
from umbra.services.weights.manifest import checksum
from umbra.services.weights.memory import private_memory


def fastest_copy(device: Device, target: int, source: int, size: int, passes: int) -> float:
    """Return the seconds of the fastest of `passes` copies within a GPU."""
    best = float("inf")
    for _ in range(passes):
        began = time.perf_counter()
        device.within(target, source, size)
        device.copies.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def main(handle: bytes, size: int, passes: int) -> None:
    """Import once, copy `passes` times, unmap."""
    device = Device(0)
    theirs, ours = device.open(handle), device.allocate(size)
    best = fastest_copy(device, ours, theirs, size, passes)
    memory = private_memory(size)
    address = device.pin(memory)
    device.to_host(address, ours, size)
    device.copies.synchronize()
    device.unpin(address)
    device.close(theirs)
    print(best, checksum(memory))


if __name__ == "__main__":
    main(bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
