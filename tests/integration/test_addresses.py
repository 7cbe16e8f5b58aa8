"""Bound addresses, and the addresses that others get."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import zmq
from fakes.slowness import reserved_port

from umbra.proto.net.server import Server
from umbra.proto.sockets import advertise, next_port, reachable
from umbra.services.buffer.service import BOUND, bind
from umbra.services.buffer.store import MemoryStore
from umbra.services.config import BufferConfig, RunConfig, RunSection


@pytest.mark.parametrize(
    ("bound", "host", "told"),
    [
        ("tcp://127.0.0.1:5555", "", "tcp://127.0.0.1:5555"),
        ("tcp://0.0.0.0:5555", "", f"tcp://{socket.gethostname()}:5555"),
        ("tcp://0.0.0.0:5555", "10.0.0.7", "tcp://10.0.0.7:5555"),
        ("tcp://[::]:5555", "fd00::7", "tcp://[fd00::7]:5555"),
        ("tcp://[fd00::1]:5555", "", "tcp://[fd00::1]:5555"),
    ],
)
def test_what_others_are_told(bound: str, host: str, told: str, advertised: None) -> None:
    advertise(host)
    assert reachable(bound) == told


@pytest.fixture
def advertised() -> Iterator[None]:
    yield
    advertise("")


def test_the_next_port_of_any_port_is_any() -> None:
    assert next_port("tcp://[::1]:5555") == "tcp://[::1]:5556"
    assert next_port("tcp://10.0.0.7:*") == next_port("tcp://10.0.0.7:0") == "tcp://10.0.0.7:*"


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """That nobody else is given meanwhile."""
    with ExitStack() as stack:
        reserved = [stack.enter_context(reserved_port()) for _ in range(4)]
        yield [port.getsockname()[1] for port in reserved]


@contextmanager
def a_server() -> Iterator[Server]:
    """In a context of its own: at the end its ports are free again."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(context, "buffer", "b1")
    try:
        yield server
    finally:
        server.close()
        context.term()


def bound(
    server: Server, store: MemoryStore, port: int | str = "*", ports: tuple[int, int] = (0, 0)
) -> list[str]:
    """Where control, data and events are."""
    run = RunSection(broker=f"tcp://127.0.0.1:{port}")
    config = RunConfig(run=run, buffer=BufferConfig(ports=ports))
    return [reachable(endpoint) for endpoint in bind(server, config, store)]


def test_the_buffer_binds_the_ports_that_it_is_given(ports: list[int], advertised: None) -> None:
    """A given port outranks the one before; where none is given, that one is taken."""
    advertise("node-a")
    control, data, events, other = ports
    store = MemoryStore()
    for given, bound_to in (((data, events), (data, events)), ((other, 0), (other, events))):
        with a_server() as server:
            told = bound(server, store, control, given)
        assert told == [f"tcp://node-a:{port}" for port in (control, *bound_to)]


def test_the_buffer_comes_back_where_it_was_unless_nobody_knows_that() -> None:
    """1. A buffer picks its ports. 2. It starts again: the same ones. 3. The others have ended, and
    another process has the ports; it starts again with a new address: other ones."""
    store = MemoryStore()
    with a_server() as server:
        first = bound(server, store)
    with a_server() as server:
        assert bound(server, store) == first
        store.delete(f"{BOUND} on 127.0.0.1")
        with a_server() as other:
            assert not {*bound(other, store)} & {*first}
