"""The thread that writes commits: one at a time, and none is left behind."""

from __future__ import annotations

import threading

import pytest
from fakes.slowness import limit

from umbra.services.buffer.service import Committer


def test_an_end_is_told_and_errors_of_the_disk_are_handed_over() -> None:
    woken = threading.Semaphore(0)
    committer = Committer(woken.release)
    assert committer.is_idle
    error = OSError(28, "full")

    def fails() -> None:
        raise error

    def breaks() -> None:
        raise ZeroDivisionError

    committer.begin(lambda: None)
    assert committer.under_way
    assert committer.end() is None
    committer.begin(fails)
    assert committer.end() is error
    committer.begin(breaks)
    with pytest.raises(ZeroDivisionError):
        committer.end()
    assert not committer.under_way
    for _ in range(3):
        assert woken.acquire(timeout=limit(30))
    committer.close()
