"""Freed memory stays with the process."""

from __future__ import annotations

import subprocess
import sys

from fakes.slowness import seconds

PROGRAM = """
import resource
from umbra.services.weights.memory import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

kept = keep_freed_memory()
for _ in range(3):
    held = [bytes(4 << 20) for _ in range(8)]
    del held
before = faults()
for _ in range(10):
    held = [bytes(4 << 20) for _ in range(8)]
    del held
print(int(kept), faults() - before)
"""


def test_pages_are_not_faulted_in_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds(30),
    )
    kept, faults = map(int, done.stdout.split())
    assert not kept or faults < 1000  # else 8192 for each of the ten rounds
