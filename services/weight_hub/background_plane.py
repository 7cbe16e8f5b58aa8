"""What a plane that works in the background says, and how it keeps a thread busy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from umbra.proto.errors import UmbraError
from umbra.proto.messages import Prepare, Ready, Subscribe
from umbra.services.runtime.weights.arena import Arena

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send this Prepare, which was held back, to its receiver now."""

    receiver: str
    prepare: Prepare


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The push of this Prepare came to nothing; the receiver may not know."""

    receiver: str
    prepare: Prepare
    reason: str


Late = Deliver | GiveUp


class BackgroundPlane(Protocol):
    """The hub's end of a plane whose Prepares go out when something was done first."""

    @property
    def busy(self) -> bool:
        """Whether `poll` will have something soon."""
        ...

    @property
    def agent_pid(self) -> int | None:
        """Process id of its agent, if it runs."""
        ...

    broken: str  # why it does not work after all; empty while it does

    def layout(self, arena: Arena) -> None:
        """What is pushed from now on lies in `arena`."""
        ...

    def subscribed(self, name: str, incarnation: str, message: Subscribe) -> None:
        """A receiver was given this plane."""
        ...

    def hold(self, name: str, prepare: Prepare, now: float) -> None:
        """A version is to go to `name`; `poll` says when and how."""
        ...

    def staged(self, name: str, message: Ready) -> None:
        """A receiver has a version, or could not get it."""
        ...

    def left(self, name: str) -> None:
        """A receiver is not subscribed any longer."""
        ...

    def granted(self, slot: int) -> None:
        """`slot` will be written anew, as soon as this returns."""
        ...

    def poll(self, now: float) -> list[Late]:
        """What is to be done now."""
        ...

    def close(self) -> None:
        """End threads and agents."""
        ...


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
