"""How the hub's end of a plane has work done while the hub goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from umbra.proto.errors import UmbraError

T = TypeVar("T")


class Background(Generic[T]):
    """One call at a time on a thread of its own.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._future: Future[T] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is under way, or its result was not taken yet."""
        return self._future is not None

    def start(self, call: Callable[[], T]) -> None:
        """Begin a call; none may be under way."""
        assert self._future is None
        self._future = self._thread.submit(call)

    def take(self) -> T | UmbraError | None:
        """The result of a call that has ended, once; None while there is none.

        Raises:
            Exception: what the call raised, if it was no UmbraError.
        """
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        error = future.exception()
        if isinstance(error, UmbraError):
            return error
        return future.result()

    def wait(self) -> None:
        """Wait for the call under way, if there is one; its result stays to be taken."""
        if self._future is not None:
            wait([self._future])

    def close(self) -> None:
        """Wait for the call under way, and end the thread."""
        self._thread.shutdown()
