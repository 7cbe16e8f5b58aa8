"""How the ranks of a trainer wait for each other: as long as the other lives.

Every rank tells in the store where they meet that it is alive, from a thread that does nothing
else. So a rank may write a model for an hour, and the others, which wait for what comes next, still
notice within `trainer.rank_timeout_s` that one has died or was stopped. A collective would not do:
its deadline is fixed when it begins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from torch.distributed import DistError

from umbra.proto.errors import DeadlineError

BEAT_S = 1.0
POLL_S = 0.01


class Store(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def add(self, key: str, amount: int, /) -> int: ...


class Silence:
    """For how long something that counts has stood still."""

    def __init__(self, now: float) -> None:
        self._count: int | None = None
        self._since = now

    def heard(self, count: int, now: float) -> float:
        """Seconds since `count` was another, or since we began to listen."""
        if count != self._count:
            self._count, self._since = count, now
        return now - self._since


class Pulse:
    """One rank's pulse, and its ear for those of the others.

    Args:
        store: shared by all ranks, for this purpose alone (`PrefixStore`).
        timeout_s: seconds that another rank may be silent.
    """

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        clone: Callable[[], Store] = store.clone  # pyright: ignore[reportAttributeAccessIssue]
        self._store = clone()  # a connection is one thread's
        self._timeout_s = timeout_s
        self._beat_s = min(BEAT_S, timeout_s / 8)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._tell, args=(clone(), rank), name="umbra-pulse", daemon=True
        )
        self._thread.start()

    def wait(self, rank: int, arrived: Callable[[], bool], what: str) -> None:
        """Return when `arrived`, which `rank` will bring about; `what` names it.

        Raises:
            DeadlineError: `rank` is silent.
            RuntimeError: the store is gone, and with it the rank that keeps it.
        """
        silence, listen = Silence(time.monotonic()), 0.0
        while not arrived():
            now = time.monotonic()
            if now >= listen:
                listen = now + self._beat_s
                if silence.heard(self._store.add(_key(rank), 0), now) > self._timeout_s:
                    raise DeadlineError(
                        f"trainer rank {rank} was silent for {self._timeout_s:g} s "
                        f"(trainer.rank_timeout_s) while {what} was waited for: it hangs, or its "
                        "machine is gone"
                    )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Fall silent."""
        self._stop.set()
        self._thread.join()

    def _tell(self, store: Store, rank: int) -> None:
        while not self._stop.is_set():
            try:
                store.add(_key(rank), 1)
            except (DistError, RuntimeError):
                return  # the rank that keeps the store is gone: the main thread finds out too
            self._stop.wait(self._beat_s)


def _key(rank: int) -> str:
    return f"pulse/{rank}"
