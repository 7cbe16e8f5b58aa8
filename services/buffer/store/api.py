"""Where the state of a run is kept: keys and values, changed in groups, all of one or nothing.

The broker writes what an event changed, and its replies leave only after `commit` has returned. So
a durable store needs no more than to survive with what it held at its last `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from umbra.proto.errors import UmbraError


class StoreError(UmbraError):
    """The store on disk is damaged, foreign, or in use by another process."""


class StoreFullError(UmbraError):
    """There is no room on the disk; nothing is lost, and the commit may be tried again."""


class Store(Protocol):
    """Keys and values. Reads see what was written, committed or not."""

    @property
    def durable(self) -> bool:
        """Whether it outlives the process."""
        ...

    @property
    def waiting_bytes(self) -> int:
        """Put since the last commit began, in memory until the next."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Set `key` to `value`."""
        ...

    def get(self, key: str) -> bytes | memoryview:
        """Return the value of `key`, or raise KeyError."""
        ...

    def get_all(self, keys: Sequence[str]) -> Sequence[bytes | memoryview]:
        """Return the values of `keys` in order, cheaper than one by one; raises KeyError."""
        ...

    def delete(self, key: str) -> None:
        """Forget `key`; it need not be there."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, in no order."""
        ...

    @property
    def size_bytes(self) -> int:
        """What is kept takes about so much room."""
        ...

    def commit(self) -> None:
        """Return when all of the above is stored; raises StoreFullError."""
        ...

    def freeze(self) -> Callable[[], None] | None:
        """Begin a commit: call the returned function on any thread, then `settle`.

        None if there is nothing to store. Reads and writes may go on; raises StoreFullError.
        """
        ...

    def settle(self, error: OSError | None = None) -> None:
        """End a commit, whose function has returned or raised `error`; raises StoreFullError."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


class MemoryStore:
    """A store that ends with the process; `durable` ones stand in for a real one in tests."""

    def __init__(self, *, durable: bool = False) -> None:
        self.durable = durable
        self.waiting_bytes = 0
        self.values: dict[str, bytes] = {}
        self._size = 0

    def put(self, key: str, value: bytes) -> None:
        self.delete(key)
        self.values[key] = value
        self._size += len(key) + len(value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def delete(self, key: str) -> None:
        value = self.values.pop(key, None)
        if value is not None:
            self._size -= len(key) + len(value)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    @property
    def size_bytes(self) -> int:
        return self._size

    def commit(self) -> None:
        """Memory is as stored as it gets."""

    def freeze(self) -> None:
        """Nothing takes long."""

    def settle(self, error: OSError | None = None) -> None:
        """Nothing was begun."""

    def close(self) -> None:
        """Nothing to let go of."""
