"""Messages between a process and its child: MessagePack behind a length, over a pair of sockets.

`child.start_worker` starts such a child. `Pipe` is an end for threads, which block on it, and which
hand on file descriptors; `AsyncPipe` is one for an event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import msgspec

from umbra.proto.deadline import Deadline
from umbra.proto.errors import UNREADABLE

MAX_BYTES = 256 << 20  # of a message
_CHUNK_BYTES = 1 << 16
_HEAD = struct.Struct("<I?")  # of a message: its bytes, and whether a file descriptor is with it

T = TypeVar("T")


def _pack(message: object, *, with_fd: bool = False) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _HEAD.pack(len(body), with_fd) + body


class _End(Generic[T]):
    """One end of a pipe; `kind` is the type of messages that come, or a union of tagged ones."""

    def __init__(self, end: socket.socket, kind: Any) -> None:
        self._end = end
        self._decode = cast(Callable[[bytes], T], msgspec.msgpack.Decoder(kind).decode)
        self._received = bytearray()
        self._with_fd = False  # the last message came with a file descriptor

    def _next(self) -> T | None:
        """Return the next message, if all of it is here; an error of `UNREADABLE` if it is none."""
        if len(self._received) < _HEAD.size:
            return None
        size, self._with_fd = _HEAD.unpack_from(self._received)
        if size > MAX_BYTES:
            raise msgspec.DecodeError(f"a message of {size} bytes: at most {MAX_BYTES}")
        end = _HEAD.size + size
        if len(self._received) < end:
            return None
        body = bytes(memoryview(self._received)[_HEAD.size : end])
        del self._received[:end]
        return self._decode(body)


class Pipe(_End[T]):
    """One end, for a thread that sends and one that receives; they may be the same."""

    def __init__(self, end: socket.socket, kind: Any) -> None:
        super().__init__(end, kind)
        self._fds: deque[int] = deque()
        self.fd = -1  # came with the last message; whoever takes it sees to its end

    def send(self, message: object, fd: int = -1) -> None:
        """Send `message`, with a copy of file descriptor `fd`; OSError if the end is closed."""
        data = _pack(message, with_fd=fd >= 0)
        self._end.settimeout(None)
        sent = socket.send_fds(self._end, [data], [fd] if fd >= 0 else [])
        self._end.sendall(data[sent:])

    def receive(self, timeout_s: float | None = None) -> T | None:
        """Return the next message, None after `timeout_s`; EOFError if the end is closed."""
        deadline = None if timeout_s is None else Deadline(timeout_s)
        while (message := self._next()) is None:
            self._end.settimeout(None if deadline is None else deadline.left_s)
            try:
                data, fds, _, _ = socket.recv_fds(self._end, _CHUNK_BYTES, 1)
            except (TimeoutError, BlockingIOError):
                return None
            except ConnectionError:
                data, fds = b"", []
            if not data:
                raise EOFError("the other process has closed its end of the pipe")
            self._fds += fds
            self._received += data
        self.fd = self._fds.popleft() if self._with_fd else -1
        return message

    def close(self) -> None:
        self._end.close()
        while self._fds:
            os.close(self._fds.popleft())


class AsyncPipe(_End[T]):
    def __init__(self, end: socket.socket, kind: Any) -> None:
        super().__init__(end, kind)
        end.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()

    def send(self, message: object) -> None:
        """Send `message`, at once as far as the socket takes it; nothing, if the other has ended.

        TypeError, ValueError or OverflowError if MessagePack cannot say it.
        """
        self._unsent += _pack(message)
        self._flush()

    def end_sending(self) -> None:
        """Send nothing more, which the other end sees as the end; it can still answer."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    async def receive(self) -> T | None:
        """Return the next message; None if the peer has ended or sent malformed data."""
        try:
            while (message := self._next()) is None:
                data = await self._loop.sock_recv(self._end, _CHUNK_BYTES)
                if not data:
                    return None
                self._received += data
            return message
        except (ConnectionError, *UNREADABLE):
            return None

    def close(self) -> None:
        if self._end.fileno() >= 0:
            self._loop.remove_writer(self._end)
            self._end.close()

    def _flush(self) -> None:
        if self._end.fileno() < 0:
            return
        try:
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._end, self._flush)
            return
        except OSError:
            self._unsent.clear()  # the other has ended, which `receive` says
        self._loop.remove_writer(self._end)
