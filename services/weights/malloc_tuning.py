"""What the C library does with memory that is freed: it is kept, or handed back.

ZeroMQ allocates every message, and numpy every temporary. glibc returns what is freed at the top of
a heap to the kernel, so that buckets of 4 MiB are faulted in again and again: 9,000 to 19,000 page
faults for 256 MiB over plane `tcp`, and next to none with this. What they cost depends on the
kernel and on how busy it is: from nothing to half of the speed was measured.
"""

from __future__ import annotations

import ctypes
import time

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT_BYTES = 256 << 20
LEAST_S = 10.0
RESTS = 1000.0
MAPPED_BYTES = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> bool:
    """Keep up to `KEPT_BYTES` of freed memory per heap, for the life of this process.

    Returns whether the C library can do so; only glibc can.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


class Freed:
    """Hands freed memory back to the kernel, wherever in the heaps it lies; glibc only.

    What a flood of connections, or of parts of a message, has taken lies between what is still
    needed when it is freed, and of itself glibc gives back the top of a heap alone.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._due = 0.0

    def give_back(self, now: float) -> None:
        """Do it, if the last time is long enough ago; `now` is monotonic, in seconds.

        It looks through all of the heaps: 30 ms for 150 MB in pieces, and whoever asks a server
        meanwhile waits: so that only one in a thousand does, it rests a thousand times
        as long as it took, and `LEAST_S` at least.
        """
        if self._trim is None or now < self._due:
            return
        began = time.perf_counter()
        self._trim(0)
        self._due = now + max(LEAST_S, RESTS * (time.perf_counter() - began))
