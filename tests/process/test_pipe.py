"""Messages over a pair of sockets arrive whole, in order, each with its own file descriptor."""

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fakes.slowness import limit

from umbra.services.process.pipe import MAX_BYTES, AsyncPipe, Pipe

WAIT_S = limit(20.0)
LARGE = os.urandom(4 << 20)


class Order(msgspec.Struct, tag=True):
    what: str


class Answer(msgspec.Struct, tag=True):
    data: bytes = b""


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_messages_larger_than_the_socket_arrive_whole(ends: Ends) -> None:
    ours, theirs = Pipe[Answer](ends[0], Answer), Pipe[Order](ends[1], Order)
    sender = threading.Thread(target=theirs.send, args=(Answer(LARGE),))
    sender.start()
    assert ours.receive(WAIT_S) == Answer(LARGE)
    sender.join()


def test_a_loop_sends_what_the_socket_does_not_take_at_once(ends: Ends) -> None:
    async def main() -> list[Any]:
        ours, theirs = AsyncPipe[Answer](ends[0], Answer), AsyncPipe[Answer](ends[1], Answer)
        ours.send(Answer(LARGE))
        ours.send(Answer(b"small"))
        async with asyncio.timeout(WAIT_S):
            return [await theirs.receive(), await theirs.receive()]

    assert asyncio.run(main()) == [Answer(LARGE), Answer(b"small")]


def test_a_descriptor_comes_with_its_own_message(ends: Ends) -> None:
    """Scenario: all is sent before anything is received; one of three has a descriptor."""
    theirs = Pipe[Order](ends[1], Order)
    reading, writing = os.pipe()
    theirs.send(Order("before"))
    theirs.send(Order("with"), writing)
    theirs.send(Order("after"))
    os.close(writing)
    ours, found = Pipe[Order](ends[0], Order), dict[str, int]()
    while order := ours.receive(0):
        found[order.what] = ours.fd
    assert (found["before"], found["after"]) == (-1, -1)
    os.write(found["with"], b"hello")
    assert os.read(reading, 9) == b"hello"
    os.close(found["with"])
    os.close(reading)


def test_what_was_said_before_the_end_is_heard(ends: Ends) -> None:
    ours, theirs = Pipe[Order](ends[0], Order), Pipe[Order](ends[1], Order)
    ours.send(Order("never received"))  # so that the end is a reset
    theirs.send(Order("last words"))
    theirs.close()
    assert ours.receive(WAIT_S) == Order("last words")
    with pytest.raises(EOFError):
        ours.receive(WAIT_S)
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send(Order("too late"))


def test_a_loop_hears_last_words_though_it_was_speaking(ends: Ends) -> None:
    async def main() -> list[Any]:
        ours, theirs = AsyncPipe[Order](ends[0], Order), Pipe[Order](ends[1], Order)
        theirs.send(Order("last words"))
        theirs.close()
        ours.send(Order("too late"))
        heard = [await ours.receive(), await ours.receive()]
        ours.close()
        ours.send(Order("later still"))
        return heard

    assert asyncio.run(main()) == [Order("last words"), None]


def test_nonsense_is_the_end(ends: Ends) -> None:
    async def heard(data: bytes) -> Any:
        ends[1].sendall(data)
        async with asyncio.timeout(WAIT_S):
            return await AsyncPipe[Answer](ends[0], Answer).receive()

    other = msgspec.msgpack.encode(Order("not an answer"))
    for size, body in ((3, b"\xc1\xc1\xc1"), (len(other), other), (MAX_BYTES + 1, b"")):
        data = struct.pack("<I?", size, False) + body
        assert asyncio.run(heard(data)) is None
        ends[1].sendall(data)
        with pytest.raises(ValueError, match=r"bytes|MessagePack|Invalid"):
            Pipe[Answer](ends[0], Answer).receive(WAIT_S)
