"""uvicorn within an event loop, with what it lacks: deadlines for clients, room for new ones."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import OrderedDict
from typing import Literal

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from umbra.proto.net.zap import Refusals
from umbra.services.http.address import is_local
from umbra.services.http.door import Door
from umbra.services.process.loop_thread import ends_with_it

CLIENT_S = 10.0  # for the head of a request, then for its body, then to read the answer
_STOP_S = 1

Turn = Literal["head", "body", "reading", ""]
_SLOW: dict[Turn, str] = {
    "head": "its request did not come",
    "body": "the body of its request did not come",
    "reading": "it did not read the answer",
}


class HttpServer:
    """Serves `app` behind a `Door` to whoever comes to a socket.

    A client has `CLIENT_S` seconds for each thing that the server waits for. For a connection
    beyond the limit the oldest one that has not sent a request is closed; if there is none, its
    request is answered with 503. `refusals` counts what was refused.

    Args:
        app: an ASGI application.
        bound: listens; closed in the end.
        key: what clients have to give as bearer token; "" = nothing.
        max_body: bytes that the body of a request may have.
        connections: how many there may be; half the process's files at most.
        name: another name that clients may call this server by (`Door`).
    """

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        *,
        key: str = "",
        max_body: int = 0,
        connections: int,
        name: str = "",
    ) -> None:
        self.refusals = Refusals()
        self._bound = bound
        door = Door(app, is_local(bound), key, max_body, self.refusals, name)
        self._server = uvicorn.Server(_Config(door, _affordable(connections), self.refusals))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve; a server that fails ends the process."""
        serving = self._server.serve(sockets=[self._bound])
        self._task = asyncio.create_task(serving, name="the HTTP server")
        self._task.add_done_callback(ends_with_it)

    async def stop(self) -> None:
        """Let open requests get their answers, for a second or so, and end."""
        self._server.should_exit = True
        if self._task is None:
            self._bound.close()
            return
        await self._task
        state = self._server.server_state
        for connection in list(state.connections):
            assert isinstance(connection, _Connection)
            connection.transport.abort()
        await asyncio.sleep(0)  # they hear of it
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=_STOP_S)


class _Config(uvicorn.Config):
    def __init__(self, app: ASGIApp, connections: int, refusals: Refusals) -> None:
        super().__init__(
            app,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what is wrong with requests is counted instead
            access_log=False,  # session ids are in the URLs
            proxy_headers=False,
            server_header=False,
            limit_concurrency=connections + 1,  # it counts the one that asks
            timeout_graceful_shutdown=_STOP_S,
        )
        self.refusals = refusals
        self.waiting: OrderedDict[_Connection, None] = OrderedDict()  # for a request, oldest first


class _Connection(H11Protocol):
    """Ends when its client keeps the server waiting.

    uvicorn itself waits without end for the rest of a request, and for its answer to be read.
    """

    config: _Config
    _turn: Turn = ""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        assert self.limit_concurrency is not None
        if len(self.connections) >= self.limit_concurrency and self.config.waiting:
            next(iter(self.config.waiting)).cut("too many connections")
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_for("")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        if self._is_answering:  # of which nothing else may be said any more
            self.cycle.disconnected = True
            self.cut("its body is not HTTP")
        else:
            self._count("not HTTP")
            super().send_400_response(msg)

    def cut(self, reason: str) -> None:
        """End the connection at once."""
        self._count(reason)
        self._wait_for("")
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """See what the server waits for."""
        if self.flow.write_paused:
            self._wait_for("reading")
        elif not self._is_answering:
            self._wait_for("head")
        else:
            self._wait_for("body" if self.conn.their_state is h11.SEND_BODY else "")

    def _wait_for(self, turn: Turn) -> None:
        if turn == self._turn:
            return  # since it began, whatever trickles in
        if self._deadline is not None:
            self._deadline.cancel()
        self.config.waiting.pop(self, None)
        self._turn, self._deadline = turn, None
        if turn:
            self._deadline = self.loop.call_later(CLIENT_S, self.cut, _SLOW[turn])
        if turn == "head":
            self.config.waiting[self] = None

    def _count(self, reason: str) -> None:
        address = self.client[0] if self.client else "?"
        self.config.refusals.add(f"an HTTP connection from {address}: {reason}")


def _affordable(connections: int) -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections if files == resource.RLIM_INFINITY else min(connections, files // 2)
