"""A server of the wire in a thread, and a channel to one, for clients that a test plays."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from umbra.proto.messages import Message
from umbra.proto.net.server import Request, Server


class ServerThread:
    """Answers requests by `answer`, unless that is None, and remembers them; closes `server`."""

    def __init__(self, server: Server, answer: Callable[[Request], Message | None]) -> None:
        self.server = server
        self.answer = answer
        self.seen: list[Request] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    @property
    def bodies(self) -> list[Message]:
        return [request.body for request in self.seen]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.server.close()

    def _main(self) -> None:
        while not self._stop.is_set():
            for request in self.server.poll(0.02):
                self.seen.append(request)
                if (body := self.answer(request)) is not None:
                    self.server.reply(request, body)


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
