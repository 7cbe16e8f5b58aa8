"""Freed memory stays with the process."""

import sys

from fakes.commands import call

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
    done = call([sys.executable, "-c", PROGRAM], check=True)
    kept, faults = map(int, done.stdout.split())
    assert not kept or faults < 1000  # else 8192 for each of the ten rounds
