"""Heartbeats of the ranks: a rank that is silent ends the others, whatever they wait for.

Every rank counts up in the store where they met, from a thread that does nothing else. So a rank
may write a model for an hour while the others wait for it in a collective of the control group,
whose deadline is hours; and they still end within `trainer.rank_timeout_s` once it hangs.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from umbra.proto.errors import EXIT_DONE, PeerLostError
from umbra.services.trainer.distributed.rendezvous import RankPlace

log = logging.getLogger(__name__)

BEAT_S = 1.0
LISTEN_BEATS = 4  # after which a living rank has been heard
LEAVE_S = 3.0  # that rank 0 keeps the store for others that are about to leave
_LOST, _ENDED = "lost", "ended"  # keys: which ranks are lost, why rank 0 ended the trainer
_LEFT = 1 << 40  # added to the count of a rank that has left


def end_process(code: int, reason: str) -> None:
    """End this process, whose main thread may hang in a collective."""
    log.log(logging.ERROR if code else logging.INFO, "%s", reason)
    os._exit(code)


class RankHeartbeat:
    """The heartbeat of the rank at `place`, and its monitor of the others' heartbeats.

    `store` is shared by all ranks, for this purpose alone (`PrefixStore`). If one is silent for
    `timeout_s`, or rank 0 has ended all, `end` is called with an exit code and a reason.
    """

    def __init__(
        self,
        store: Store,
        place: RankPlace,
        timeout_s: float,
        end: Callable[[int, str], None] = end_process,
    ) -> None:
        clone: Callable[[], Store] = store.clone  # pyright: ignore[reportAttributeAccessIssue]
        self._store = clone()  # a connection is one thread's
        self._rank, self._describe, self._end = place.rank, place.describe, end
        self._timeout_s, self._beat_s = timeout_s, min(BEAT_S, timeout_s / 8)
        self._stop = threading.Event()
        self._counts = dict.fromkeys((r for r in range(place.world) if r != place.rank), 0)
        self._heard = dict.fromkeys(self._counts, time.monotonic())
        # If the rank that keeps the store is stopped, a question to the store never returns: one
        # thread asks, another one looks at the clock.
        self._threads = [
            threading.Thread(target=self._ask, args=(clone(),), name="umbra-beat", daemon=True),
            threading.Thread(target=self._watch, name="umbra-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def lost(self) -> str:
        """Name the ranks that stand still, for a rank that has lost its connection to one.

        The first rank to find out notifies the others, which end as well.
        """
        self._stop.wait(LISTEN_BEATS * self._beat_s)
        limit = time.monotonic() - (LISTEN_BEATS - 1) * self._beat_s
        still = [rank for rank, heard in self._heard.items() if heard < limit]
        try:
            if not self._store.check([_LOST]):
                self._store.set(_LOST, " ".join(map(str, still)))
            still = [int(rank) for rank in self._store.get(_LOST).split()]
        except (DistError, RuntimeError):
            still = [0]  # which keeps the store
        return ", ".join(map(self._describe, still)) or "which cannot be told"

    def end_all(self, reason: str) -> None:
        """Have the others end (rank 0), whose supervisors would start them again for nothing."""
        self._store.set(_ENDED, reason)

    def leave(self) -> None:
        """Stop beating without being missed; rank 0 keeps the store until the others have left."""
        self.close()
        try:
            self._store.add(_key(self._rank), _LEFT)
            deadline = time.monotonic() + LEAVE_S
            while self._rank == 0 and time.monotonic() < deadline:
                if all(self._store.add(_key(rank), 0) >= _LEFT for rank in self._counts):
                    return
                time.sleep(0.01)
        except (DistError, RuntimeError):
            return  # rank 0 has left before

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(self._beat_s)  # no longer: it may be asking a store that is stopped

    def _ask(self, store: Store) -> None:
        while not self._stop.is_set():
            try:
                store.add(_key(self._rank), 1)
                for rank, previous in self._counts.items():
                    count = store.add(_key(rank), 0)
                    if count != previous or count >= _LEFT:
                        self._counts[rank], self._heard[rank] = count, time.monotonic()
                if self._rank and store.check([_ENDED]):
                    reason = store.get(_ENDED).decode()
                    store.add(_key(self._rank), _LEFT)
                    self._end(EXIT_DONE, f"rank 0 has ended the trainer: {reason}")
                    return
            except (DistError, RuntimeError):
                return  # the rank that keeps the store is gone: the main thread finds out too
            self._stop.wait(self._beat_s)

    def _watch(self) -> None:
        while not self._stop.wait(self._beat_s):
            limit = time.monotonic() - self._timeout_s
            silent = [rank for rank, heard in self._heard.items() if heard < limit]
            if silent:
                names = ", ".join(map(self._describe, [0] if 0 in silent else silent))
                self._end(
                    PeerLostError.exit_code,
                    f"trainer rank {self._rank} lost another rank: {names} was silent for "
                    f"{self._timeout_s:g} s (trainer.rank_timeout_s): it hangs, or its machine is "
                    "gone",
                )
                return


def _key(rank: int) -> str:
    return f"beat/{rank}"
