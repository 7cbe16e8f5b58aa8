"""Copies of memory that let other threads go on."""

from __future__ import annotations

import os
import random
import sys
import threading
from mmap import PAGESIZE

import pytest

from umbra.services.weights.memory import copy


@pytest.mark.parametrize("size", [0, 1, PAGESIZE + 7])
def test_a_copy_has_the_bytes_of_its_source(size: int) -> None:
    source, target = random.Random(size).randbytes(size), bytearray(size + 2)
    for kind in (source, memoryview(bytearray(source))):
        target[:] = bytes(size + 2)
        copy(kind, memoryview(target)[1 : size + 1])
        assert bytes(target) == b"\0" + source + b"\0"


def test_only_what_fits_is_copied() -> None:
    for size in (3, 5):
        with pytest.raises(ValueError, match=f"{size} bytes do not fill 4"):
            copy(bytes(size), memoryview(bytearray(4)))
    with pytest.raises(TypeError):
        copy(bytes(4), memoryview(bytes(4)))


def test_other_threads_run_during_a_copy() -> None:
    source = memoryview(bytearray(b"x" * (64 << 20)))

    def seen_half_done() -> bool:
        into = memoryview(bytearray(len(source)))
        copying = threading.Thread(target=copy, args=(source, into))
        copying.start()
        ends = {0}
        while ends == {0}:  # until a part is there
            os.sched_yield()
            ends = {into[PAGESIZE], into[-PAGESIZE]}
        copying.join()
        return 0 in ends

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # nobody is made to let go of the interpreter
    try:
        # More than once, since on a busy machine a copy may end before we get a core.
        assert any(seen_half_done() for _ in range(50))
    finally:
        sys.setswitchinterval(interval)
