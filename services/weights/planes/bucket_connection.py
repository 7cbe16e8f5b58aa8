"""The receiver's end of a connection for buckets: it comes about, and brings pieces."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass

from umbra.proto.errors import WireError
from umbra.proto.records import Piece
from umbra.services.weights.planes.bucket_records import (
    HEAD,
    KERNELS_BYTES,
    Seal,
    ticket,
    unpack_head,
)

CONNECT_S = 2.0

Room = Callable[[Piece, int], memoryview | None]


class BrokenError(WireError):
    """The connection is not there any more."""


@dataclass(frozen=True, slots=True)
class Came:
    """A piece as it was sent, and its bytes. `placed`: they are where they belong."""

    piece: Piece
    data: memoryview
    placed: bool


class BucketConnection:
    """Connects at once; used by one thread.

    Args:
        host: name or address.
        port: there.
        key: of the order.
        seal: this end of it.
        look_s: seconds that a read waits at most.
        credit_bytes: that may be under way.

    Raises:
        OSError: nobody answers there.
    """

    def __init__(
        self, host: str, port: int, key: bytes, seal: Seal, look_s: float, credit_bytes: int
    ) -> None:
        self._seal = seal
        self._socket = socket.create_connection((host, port), CONNECT_S)
        try:
            self._socket.settimeout(None)  # reads of the kernel are bounded, see below
            bound = struct.pack("ll", int(look_s), round(look_s % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
            if credit_bytes < KERNELS_BYTES:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, credit_bytes)
            self._socket.sendall(ticket(key))
        except OSError:
            self._socket.close()
            raise
        self._head = bytearray(HEAD.size)
        self._trailer = memoryview(bytearray(seal.trailer_bytes))
        self._block = memoryview(bytearray(0))

    def next(self, room: Room) -> Generator[None, None, Came]:
        """The next piece; yields None each time that nothing came for `look_s` seconds.

        Args:
            room: gives the memory for a piece of so many bytes, or None if it has none; what it
                raises passes.

        Raises:
            BrokenError: the connection is not there any more.
            WireError: what came is not what the source sealed, or has no place here.
        """
        yield from self._fill(memoryview(self._head))
        head = bytes(self._head)
        piece, nbytes = unpack_head(head)
        given = room(piece, nbytes)
        place = memoryview(bytearray(nbytes)) if given is None else given
        sealed = self._trailer
        if self._seal.hides:
            sealed = self._memory(nbytes + self._seal.trailer_bytes)
        else:
            yield from self._fill(place)
        yield from self._fill(sealed)
        self._seal.open(head, sealed, place)
        return Came(piece, place, given is not None)

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def _memory(self, nbytes: int) -> memoryview:
        if len(self._block) < nbytes:
            self._block = memoryview(bytearray(nbytes))
        return self._block[:nbytes]

    def _fill(self, memory: memoryview) -> Generator[None, None, None]:
        """Read until `memory` is full, as much as comes with each call of the kernel."""
        done = 0
        while done < len(memory):
            try:
                count = self._socket.recv_into(memory[done:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                yield None
                continue
            except OSError as error:
                raise BrokenError(f"the connection broke: {error}") from error
            if count == 0:
                raise BrokenError("the connection was closed")
            done += count
