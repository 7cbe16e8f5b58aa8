"""CUDA IPC between two processes on one GPU, beside a copy inside of one process.

This is the real path of plane `cuda_ipc`, and its bandwidth means something.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from umbra.services.weights.gpu import cuda
from umbra.services.weights.manifest import checksum
from umbra.services.weights.memory import private_memory

PEER = Path(__file__).parents[1] / "programs" / "ipc_peer.py"
SIZE = 1 << 30
PASSES = 10
SHARE = 0.8  # of the bandwidth of a copy inside of one process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cuda.cuda_unavailable() is not None, reason=str(cuda.cuda_unavailable())),
]


def test_the_other_process_copies_the_same_bytes_nearly_as_fast() -> None:
    device = cuda.Device(0)
    memory = private_memory(SIZE)
    memory[:] = os.urandom(1 << 20) * (SIZE >> 20)
    host = device.pin(memory)
    ours, other = device.allocate(SIZE), device.allocate(SIZE)
    try:
        device.to_device(ours, host, SIZE)
        device.copies.synchronize()
        floor = float("inf")
        for _ in range(PASSES):
            began = time.perf_counter()
            device.within(other, ours, SIZE)
            device.copies.synchronize()
            floor = min(floor, time.perf_counter() - began)
        done = subprocess.run(
            [sys.executable, str(PEER), device.export(ours).hex(), str(SIZE), str(PASSES)],
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        device.unpin(host)
        device.free(ours)
        device.free(other)
    seconds, found = done.stdout.split()
    print(f"device to device {SIZE / floor / 1e9:.0f} GB/s, IPC {SIZE / float(seconds) / 1e9:.0f}")
    assert int(found) == checksum(memory)
    assert floor / float(seconds) >= SHARE
