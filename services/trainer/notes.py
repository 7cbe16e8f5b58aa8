"""What ranks leave for each other in the store where they meet, and wait for.

A wait lasts for as long as the other rank lives (`pulse.py`): no collective hangs here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from umbra.services.trainer.pulse import Pulse


class NoteStore(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...


class Notes:
    """One rank's view of them.

    Args:
        store: shared by all ranks, for notes alone (`PrefixStore`).
        pulse: how the ranks wait for each other.
    """

    def __init__(self, store: NoteStore, rank: int, pulse: Pulse) -> None:
        self._store = store
        self._rank = rank
        self._pulse = pulse

    def leave(self, what: str, text: str) -> None:
        """Leave `text` for the other ranks; `what` names it once."""
        self._store.set(f"{what}/{self._rank}", text)

    def of(self, rank: int, what: str, awaited: str) -> bytes:
        """What `rank` left, or will leave; `awaited` says it in an error.

        Raises:
            DeadlineError: it is silent.
        """
        key = f"{what}/{rank}"
        return self._pulse.wait(rank, lambda: self._look(key), awaited)

    def forget(self, ranks: Iterable[int], what: str) -> None:
        """Keep the store small: nobody asks for these any more."""
        for rank in ranks:
            self._store.delete_key(f"{what}/{rank}")

    def _look(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None
