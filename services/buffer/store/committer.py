"""The thread that writes commits, one at a time, while the loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue

from umbra.proto.errors import service_thread


class Committer:
    """A thread and two queues: an executor's future costs as much as several trajectories.

    Args:
        wake: called from the thread at the end of each commit.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.under_way = False  # a commit was begun, and its end was not taken note of
        self._wake = wake
        self._writes: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._ends: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread = service_thread(self._run, "commit")
        self._thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether nothing has to be waited for before the next commit."""
        return not self.under_way or not self._ends.empty()

    def begin(self, write: Callable[[], None]) -> None:
        """Have `write` called on the thread."""
        assert not self.under_way
        self.under_way = True
        self._writes.put(write)

    def end(self) -> OSError | None:
        """Wait until the commit under way is over; what the disk said, if it failed.

        Raises:
            BaseException: whatever else it has raised.
        """
        error = self._ends.get()
        self.under_way = False
        if error is not None and not isinstance(error, OSError):
            raise error
        return error

    def close(self) -> None:
        """End the thread, after the commit under way."""
        self._writes.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (write := self._writes.get()) is not None:
            error: BaseException | None = None
            try:
                write()
            except BaseException as raised:  # noqa: BLE001 - the loop's thread has to hear of it
                error = raised
            self._ends.put(error)
            self._wake()
