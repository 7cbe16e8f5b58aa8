"""A channel to a server that a test plays."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from umbra.proto.messages import Message


class FakeChannel:
    """Keeps requests; the test answers them."""

    def __init__(self) -> None:
        self.open: list[tuple[Message, Future[Message]]] = []
        self.pushes: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def request(
        self,
        body: Message,
        *,
        timeout_s: float,
        on_done: Callable[[Future[Message]], None] | None = None,
    ) -> Future[Message]:
        assert timeout_s > 0
        future: Future[Message] = Future()
        if on_done is not None:
            future.add_done_callback(on_done)
        self.open.append((body, future))
        return future

    def answer(self, kind: type[Message], reply: Message | Exception) -> Any:
        index = next(i for i, (body, _) in enumerate(self.open) if isinstance(body, kind))
        body, future = self.open.pop(index)
        if isinstance(reply, Exception):
            future.set_exception(reply)
        else:
            future.set_result(reply)
        return body

    def asked(self, kind: type[Message]) -> list[Any]:
        return [body for body, _ in self.open if isinstance(body, kind)]
