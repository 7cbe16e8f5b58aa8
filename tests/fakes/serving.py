"""A server of the wire in a thread, for clients that a test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable

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
