"""ZeroMQ sockets, every option in this one place.

HWM bounds memory per peer; LINGER is bounded so that no process hangs at exit; heartbeats find dead
TCP peers: the connecting side sends them, with a time to live for the binding one, so that a server
of a thousand connections answers and need not ask as well; ROUTER_MANDATORY turns a send to an
unknown peer into an error instead of a silent drop; ROUTER_HANDOVER lets a restarted peer take over
its identity.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import zmq

from umbra.proto.codec import DEFAULT_LIMITS
from umbra.proto.errors import StartupError

LINGER_MS = 1_000
HEARTBEAT_INTERVAL_MS = 10_000  # two connections of each member: a server of many notices
HEARTBEAT_TIMEOUT_MS = 20_000
HWM_MESSAGES = 1_000
ROUTER_RECEIVE_HWM = 2  # of each peer: a server of many must not take in what it cannot work on yet
TELEMETRY_HWM_MESSAGES = 10_000
RECONNECT_MS = 50
BINDING = (zmq.ROUTER, zmq.XSUB, zmq.XPUB)
RECONNECT_MAX_MS = 1_000


def router(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> tuple[zmq.Socket[bytes], str]:
    """A bound ROUTER and the endpoint it really has (port `*` or 0 picks a free one).

    Raises:
        StartupError: the address is taken or not ours.
    """
    socket = _socket(context, zmq.ROUTER)
    socket.set(zmq.RCVHWM, ROUTER_RECEIVE_HWM)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set(zmq.ROUTER_HANDOVER, 1)
    return socket, _bind(socket, endpoint)


def dealer(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, identity: bytes
) -> zmq.Socket[bytes]:
    """A DEALER that connects to `endpoint` under `identity`; not yet if `endpoint` is empty.

    Raises:
        StartupError: `endpoint` is no address; whether somebody listens there shows later.
    """
    socket = _socket(context, zmq.DEALER)
    socket.set(zmq.IDENTITY, identity)
    if endpoint:
        connect(socket, endpoint)
    return socket


def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect to `endpoint`; whether somebody listens there shows later.

    Raises:
        StartupError: it is no address. The socket is closed then.
    """
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise StartupError(
            f"cannot connect to {endpoint!r}: {error}; write it as tcp://host:port"
        ) from error


def publisher(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    """A PUB that connects to the relay; never blocks, may drop.

    Raises:
        StartupError: `endpoint` is no address.
    """
    socket = _socket(context, zmq.PUB, TELEMETRY_HWM_MESSAGES)
    connect(socket, endpoint)
    return socket


def subscriber(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, topics: Sequence[bytes] = (b"",)
) -> zmq.Socket[bytes]:
    """A SUB that connects to the relay.

    Raises:
        StartupError: `endpoint` is no address.
    """
    socket = _socket(context, zmq.SUB, TELEMETRY_HWM_MESSAGES)
    for topic in topics:
        socket.set(zmq.SUBSCRIBE, topic)
    connect(socket, endpoint)
    return socket


def relay(
    context: zmq.Context[zmq.Socket[bytes]], endpoint_in: str, endpoint_out: str
) -> tuple[zmq.Socket[bytes], str, zmq.Socket[bytes], str]:
    """The XSUB that publishers connect to and the XPUB that subscribers connect to, both bound.

    Raises:
        StartupError: an address is taken or not ours.
    """
    inward = _socket(context, zmq.XSUB, TELEMETRY_HWM_MESSAGES)
    actual_in = _bind(inward, endpoint_in)
    outward = _socket(context, zmq.XPUB, TELEMETRY_HWM_MESSAGES)
    try:
        actual_out = _bind(outward, endpoint_out)
    except StartupError:
        inward.close(linger=0)
        raise
    return inward, actual_in, outward, actual_out


def pair(
    context: zmq.Context[zmq.Socket[bytes]], name: str
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Two ends of an in-process pipe: one thread wakes another that polls sockets."""
    bound = _socket(context, zmq.PAIR)
    bound.bind(f"inproc://{name}")
    connected = _socket(context, zmq.PAIR)
    connected.connect(f"inproc://{name}")
    return bound, connected


def _socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, hwm: int = HWM_MESSAGES
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.SNDHWM, hwm)
    socket.set(zmq.RCVHWM, hwm)
    socket.set(zmq.MAXMSGSIZE, DEFAULT_LIMITS.frame_bytes)
    if kind not in BINDING:
        socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.set(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return socket


def _bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"{endpoint} is in use by another process: stop it or choose another port"
            ) from error
        raise StartupError(
            f"cannot bind {endpoint!r}: {error}; write it as tcp://address-of-this-host:port"
        ) from error
    return socket.get_string(zmq.LAST_ENDPOINT)
