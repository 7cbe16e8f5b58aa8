"""Memory of this process that holds weights, and copies of it that stop nobody."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Any


def private_memory(size: int, *, touched: bool = True) -> memoryview:
    """`size` writable bytes of this process alone, already faulted in.

    Without `touched`, memory is taken only for what is written. In huge pages where the kernel has
    them to give: copies and checksums are a fifth faster.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    if touched:
        view[:: mmap.PAGESIZE] = bytes(len(view[:: mmap.PAGESIZE]))
    return view


def copy(source: bytes | memoryview, target: memoryview) -> None:
    """Copy `source` to `target`, which is as long, while other threads of this process go on.

    `target[:] = source` holds the interpreter's lock. A thread that does so again and again leaves
    hardly any time to one that needs the lock for a moment at every step, as a decoding engine
    does: that came down to a tenth of its speed, and further the smaller the pieces were.

    Raises:
        ValueError: the lengths differ.
        TypeError: memory that cannot be written.
    """
    size = len(target)
    if len(source) != size:
        raise ValueError(f"{len(source)} bytes do not fill {size}")
    if size == 0:
        return
    ctypes.memmove(_place(target), source if isinstance(source, bytes) else _place(source), size)


def _place(memory: memoryview) -> Any:
    """Where `memory` begins; nobody can unmap it while somebody holds this."""
    return ctypes.byref(ctypes.c_char.from_buffer(memory))
