"""Heartbeats of the ranks of a trainer: how they wait for each other, as long as the other lives.

Every rank counts up in the store where they meet, from a thread that does nothing
else. So a rank may write a model for an hour, and the others, which wait for what comes next, still
notice within `trainer.rank_timeout_s` that one has died or was stopped. A collective would not do:
its deadline is fixed when it begins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, Protocol, TypeVar

from torch.distributed import DistError

from umbra.proto.errors import DeadlineError, PeerLostError

T = TypeVar("T")

BEAT_S = 1.0
POLL_S = 0.01
LISTEN_BEATS = 4  # after which a living rank has been heard
_LOST = "lost"


class RankStore(Protocol):
    """The part of `torch.distributed.Store` that ranks use."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


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


class Liveness:
    """One rank's heartbeat, and its ear for those of the others.

    Args:
        store: shared by all ranks, for this purpose alone (`PrefixStore`).
        timeout_s: seconds that another rank may be silent.
        describe: names a rank in sentences, with its host.
    """

    def __init__(
        self,
        store: RankStore,
        rank: int,
        timeout_s: float,
        describe: Callable[[int], str] = lambda rank: f"trainer rank {rank}",
    ) -> None:
        clone: Callable[[], RankStore] = store.clone  # pyright: ignore[reportAttributeAccessIssue]
        self._store = clone()  # a connection is one thread's
        self._describe = describe
        self._silences: dict[int, Silence] = {}  # of those that `check` looks at
        self._timeout_s = timeout_s
        self._beat_s = min(BEAT_S, timeout_s / 8)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._tell, args=(clone(), rank), name="umbra-heartbeat", daemon=True
        )
        self._thread.start()

    def wait(self, rank: int, ask: Callable[[], T | None], what: str) -> T:
        """What `ask` finds once it finds something, which `rank` brings about; `what` names it.

        `ask` is called in another thread: if the rank that keeps the store is stopped, a question
        to the store never comes back.

        Raises:
            DeadlineError: `rank` is silent.
            RuntimeError: the store is gone, and with it the rank that keeps it.
        """
        asking = _Asking(ask, partial(self._store.add, _key(rank), 0), self._beat_s)
        while not asking.done.wait(self._beat_s):
            if time.monotonic() - asking.heard > self._timeout_s:
                asking.enough.set()
                raise self._silent(rank, f"while {what} was waited for")
        if asking.error is not None:
            raise asking.error
        assert asking.found is not None
        return asking.found

    def check(self, world: int) -> None:
        """Rank 0, which keeps the store, looks whether all others live; it does not wait.

        Raises:
            DeadlineError: one has been silent since it was last heard of.
            PeerLostError: another rank has lost one, and ended.
        """
        if self._store.check([_LOST]):
            lost = self._names(self._store.get(_LOST).decode())
            raise PeerLostError(f"another rank has lost {lost}, and ended")
        for rank in range(1, world):
            count, now = self._store.add(_key(rank), 0), time.monotonic()
            silence = self._silences.setdefault(rank, Silence(now))
            if silence.heard(count, now) > self._timeout_s:
                raise self._silent(rank, "while there was nothing to be done")

    def blame(self, world: int) -> str:
        """Which of the other ranks do not live, in words; for a rank that has lost one of them.

        The first who finds out tells the others, which end as well.
        """
        asking = _Asking(lambda: self._lost(world), lambda: 0, self._beat_s)
        if not asking.done.wait(2 * LISTEN_BEATS * self._beat_s) or asking.error is not None:
            return self._describe(0)  # which keeps the store
        assert asking.found is not None
        return self._names(asking.found)

    def _names(self, ranks: str) -> str:
        return ", ".join(self._describe(int(r)) for r in ranks.split()) or "which cannot be told"

    def _lost(self, world: int) -> str:
        """Numbers of the ranks whose counts stand still."""
        store = self._store
        if not store.check([_LOST]):
            before = [store.add(_key(rank), 0) for rank in range(world)]
            time.sleep(LISTEN_BEATS * self._beat_s)
            still = [r for r in range(world) if store.add(_key(r), 0) == before[r]]
            store.set(_LOST, " ".join(map(str, still)))
        return store.get(_LOST).decode()

    def _silent(self, rank: int, when: str) -> DeadlineError:
        return DeadlineError(
            f"{self._describe(rank)} was silent for {self._timeout_s:g} s "
            f"(trainer.rank_timeout_s) {when}: it hangs, or its machine is gone"
        )

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self._beat_s)  # no longer: it may be asking a store that is stopped

    def _tell(self, store: RankStore, rank: int) -> None:
        while not self._stop.is_set():
            try:
                store.add(_key(rank), 1)
            except (DistError, RuntimeError):
                return  # the rank that keeps the store is gone: the main thread finds out too
            self._stop.wait(self._beat_s)


class _Asking(Generic[T]):
    """Asks again and again, in a thread, until there is an answer or there was `enough`."""

    def __init__(
        self, ask: Callable[[], T | None], count: Callable[[], int], every_s: float
    ) -> None:
        self.done, self.enough = threading.Event(), threading.Event()
        self.found: T | None = None
        self.error: RuntimeError | None = None
        self.heard = time.monotonic()  # the last sign of life
        self._ask, self._count, self._every_s = ask, count, every_s
        threading.Thread(target=self._run, name="umbra-ranks", daemon=True).start()

    def _run(self) -> None:
        silence, listen = Silence(self.heard), 0.0
        try:
            while (found := self._ask()) is None and not self.enough.is_set():
                if time.monotonic() >= listen:
                    count = self._count()
                    now = time.monotonic()
                    self.heard = now - silence.heard(count, now)
                    listen = now + self._every_s
                time.sleep(POLL_S)
            self.found = found
        except RuntimeError as error:
            self.error = error
        self.done.set()


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


class RankMessages:
    """Messages that ranks leave for each other in their store, and wait for while the other lives.

    Args:
        store: shared by all ranks, for these messages alone (`PrefixStore`).
        heartbeat: how the ranks wait for each other.
    """

    def __init__(self, store: RankStore, rank: int, heartbeat: Liveness) -> None:
        self._store = store
        self._rank = rank
        self._heartbeat = heartbeat

    def put(self, what: str, text: str) -> None:
        """Leave `text` for the other ranks; `what` names it once."""
        self._store.set(f"{what}/{self._rank}", text)

    def get(self, rank: int, what: str, awaited: str) -> bytes:
        """Wait for the message of `rank` called `what`; `awaited` names it in an error.

        Raises:
            DeadlineError: it is silent.
        """
        key = f"{what}/{rank}"
        return self._heartbeat.wait(rank, lambda: self._look(key), awaited)

    def forget(self, ranks: Iterable[int], what: str) -> None:
        """Keep the store small: nobody asks for these any more."""
        for rank in ranks:
            self._store.delete_key(f"{what}/{rank}")

    def _look(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None
