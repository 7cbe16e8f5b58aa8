"""Keeps the C library from handing memory back that is needed again at once.

ZeroMQ allocates every message, and numpy every temporary. glibc returns what is freed at the top of
a heap to the kernel, so that buckets of 4 MiB are faulted in again and again: 9,000 to 19,000 page
faults for 256 MiB over plane `tcp`, and next to none with this. What they cost depends on the
kernel and on how busy it is: from nothing to half of the speed was measured.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
KEPT_BYTES = 256 << 20
MAPPED_BYTES = 32 << 20  # the most that glibc takes


def keep_freed_memory() -> bool:
    """Keep up to `KEPT_BYTES` of freed memory per heap, for the life of this process.

    Returns whether the C library can do so; only glibc can.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
