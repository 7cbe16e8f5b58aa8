"""ZeroMQ sockets, every option in this one place.

High-water marks bound memory per peer: they are libzmq's, 1000 messages each way, where nothing
else is said. LINGER is bounded so that no process hangs at exit. TCP keepalive finds dead peers, on
both sides. ZMTP's heartbeats stay off: libzmq 4.3.5 aborts (stream_engine_base.cpp:310,
`!_io_error`) on a PING from a broken connection whose reading a receive limit had stopped, as after
a process was suspended.
"""

from __future__ import annotations

import errno
import re
import socket as tcp
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq

from umbra.proto.access import MOST_BYTES, socket_bytes
from umbra.proto.errors import StartupError, UmbraError, UsageError

NOBLOCK = int(zmq.NOBLOCK)  # as a number: the enumeration takes a microsecond to combine
Socket: TypeAlias = zmq.Socket[bytes]
Context: TypeAlias = zmq.Context[Socket]

UNACKNOWLEDGED_MS = 20_000  # a connection with such data ends then, as an idle one to a dead host
HANDSHAKE_MS = 10_000  # for a peer to show its key; whoever is slower is disconnected
OPTIONS: dict[int, int] = {
    zmq.LINGER: 1_000,
    zmq.MAXMSGSIZE: MOST_BYTES,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,  # seconds
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 2,
    zmq.TCP_MAXRT: UNACKNOWLEDGED_MS,
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 1_000,
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
}
ROUTER_OPTIONS: dict[int, int] = {
    zmq.RCVHWM: 2,  # of each peer: a server of many must not take in what it cannot work on yet
    zmq.ROUTER_MANDATORY: 1,  # a send to an unknown peer is an error, no silent drop
    # A peer whose connection broke comes back under its identity before the old one is known dead.
    zmq.ROUTER_HANDOVER: 1,
}
ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[^\s:/]+):(\d{1,5})|ipc://.+")


@dataclass(frozen=True, slots=True)
class Curve:
    """CURVE keys of one end of connections, 40 characters of Z85 each."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""  # that a connecting end expects
    domain: str = ""  # by which a binding end's allow-list is asked; without a list all are refused


def check_address(address: str, flag: str) -> None:
    """Raise UsageError unless `address`, which `flag` gives, is one to connect to."""
    if address.startswith("tcp://") and address.endswith(":*"):
        raise UsageError(
            f"{flag} is missing, or {address} has no port: write it as tcp://host:port, which the "
            "other side logs when it starts"
        )
    match = ADDRESS.fullmatch(address)
    if match is None or int(match[2] or 0) > 65_535:
        raise UsageError(f"{flag} {address or repr(address)}: write it as tcp://host:port")


def router(
    context: Context, endpoint: str, curve: Curve | None = None, frame_bytes: int = MOST_BYTES
) -> tuple[Socket, str]:
    """Return a bound ROUTER and the endpoint it really has (port `*` or 0 picks a free one).

    A peer that sends a frame of more than `frame_bytes` loses its connection. StartupError if the
    address is taken, UsageError if it is not ours.
    """
    options = ROUTER_OPTIONS | {zmq.MAXMSGSIZE: frame_bytes}
    return _bound(_socket(context, zmq.ROUTER, curve, options), endpoint)


def publisher(context: Context, endpoint: str, curve: Curve | None = None) -> tuple[Socket, str]:
    """Bind the PUB that subscribers connect to; never blocks, may drop. Raises as `router`."""
    options: dict[int, int] = {zmq.MAXMSGSIZE: socket_bytes("events")}
    return _bound(_socket(context, zmq.PUB, curve, options), endpoint)


def dealer(context: Context, endpoint: str, identity: bytes, curve: Curve | None = None) -> Socket:
    """Return a DEALER that is connected to `endpoint`, or not yet if that is empty."""
    socket = _socket(context, zmq.DEALER, curve, {zmq.IDENTITY: identity})
    if endpoint:
        connect(socket, endpoint)
    return socket


def subscriber(context: Context, endpoint: str, curve: Curve | None = None) -> Socket:
    socket = _socket(context, zmq.SUB, curve, {zmq.SUBSCRIBE: b""})
    connect(socket, endpoint)
    return socket


def connect(socket: Socket, endpoint: str) -> None:
    """Connect `socket`; close it and raise UsageError if `endpoint` is no address."""
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        reason = f"cannot connect to {endpoint!r}: {error}; write it as tcp://host:port"
        raise UsageError(reason) from error


class Waker:
    """An in-process pipe by which any thread ends the poll of `socket` by its owner."""

    def __init__(self, context: Context, name: str) -> None:
        self._lock = threading.Lock()
        self.socket, self._outward = _socket(context, zmq.PAIR), _socket(context, zmq.PAIR)
        self.socket.bind(f"inproc://{name}")
        self._outward.connect(f"inproc://{name}")

    def wake(self) -> None:
        with self._lock, suppress(zmq.Again):  # full: it is awake, with plenty to do
            if not self._outward.closed:
                self._outward.send(b"", zmq.NOBLOCK)

    def drain(self) -> None:
        with suppress(zmq.Again):
            while True:
                self.socket.recv(zmq.NOBLOCK)

    def close(self) -> None:
        with self._lock:
            self._outward.close(linger=0)
            self.socket.close(linger=0)


def allow_list(context: Context) -> Socket:
    """Return the REP that libzmq asks about the key of every peer in `context` (ZAP, RFC 27)."""
    socket = _socket(context, zmq.REP)
    socket.bind("inproc://zeromq.zap.01")
    return socket


def handshakes(context: Context, socket: Socket, events: int) -> Socket:
    """Return a PAIR with `events` of `socket`; close it after `socket.disable_monitor()`."""
    address = f"inproc://handshakes-{socket.underlying:x}"
    socket.monitor(address, events)
    monitor = context.socket(zmq.PAIR)
    monitor.set(zmq.LINGER, 0)
    monitor.set(zmq.RCVHWM, 0)  # a full one would hold up the thread that does all input and output
    monitor.connect(address)
    return monitor


def _socket(
    context: Context,
    kind: int,
    curve: Curve | None = None,
    options: Mapping[int, int | bytes] | None = None,
) -> Socket:
    socket = context.socket(kind)
    for option, value in {**OPTIONS, **(options or {})}.items():
        socket.set(option, value)
    if curve is not None:
        socket.set(zmq.CURVE_PUBLICKEY, curve.public)
        socket.set(zmq.CURVE_SECRETKEY, curve.secret)
        if curve.server:
            socket.set(zmq.CURVE_SERVERKEY, curve.server)
        else:
            socket.set(zmq.CURVE_SERVER, True)
            socket.set(zmq.ZAP_DOMAIN, curve.domain.encode())
            socket.set(zmq.ZAP_ENFORCE_DOMAIN, True)  # closed while nobody answers for the domain
    return socket


def _bound(socket: Socket, endpoint: str) -> tuple[Socket, str]:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise _not_bound(endpoint, error) from error
    return socket, socket.get_string(zmq.LAST_ENDPOINT)


def check_port_free(endpoint: str) -> None:
    """Raise StartupError if another process listens at `endpoint`; port * or 0 is free always."""
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdigit() and port != "0":
        with suppress(UsageError):  # whoever binds it says what else is wrong with it
            tcp_listener(endpoint).close()


def tcp_listener(endpoint: str, backlog: int = 128) -> tcp.socket:
    """Return a plain TCP socket that listens at `endpoint`; errors as of `router`.

    SO_REUSEADDR is set, as by ZeroMQ: only who listens is in the way.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    try:
        address = ("" if host == "*" else host, 0 if port == "*" else int(port))
        family = tcp.AF_INET6 if ":" in host else tcp.AF_INET
        return tcp.create_server(address, family=family, backlog=backlog)
    except (OSError, OverflowError, ValueError) as error:
        raise _not_bound(endpoint, error) from error


def _not_bound(endpoint: str, error: Exception) -> UmbraError:
    if getattr(error, "errno", None) == errno.EADDRINUSE:
        reason = f"{endpoint} is in use by another process: stop it or choose another port"
        return StartupError(reason)
    return UsageError(
        f"cannot bind {endpoint!r}: {error}; write it as tcp://address-of-this-host:port"
    )


_advertised = ""


def advertise(host: str) -> None:
    """Set the host by which others reach this process (`run.advertise`); empty: the bound one."""
    global _advertised
    _advertised = host


def reachable(endpoint: str) -> str:
    """Return the bound `endpoint` with the advertised host, or this machine's for a wildcard."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    known = _advertised or (tcp.gethostname() if host in ("*", "0.0.0.0", "[::]") else host)
    if ":" in known and not known.startswith("["):
        known = f"[{known}]"  # IPv6
    return f"tcp://{known}:{port}"


def next_port(endpoint: str) -> str:
    """Return the address after `endpoint` on its host; any port if its own is any."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}" if port.isdigit() and int(port) else f"{host}:*"


def interface_towards(host: str) -> str:
    """Return the name of this host's interface towards `host`, if known. Nothing is sent."""
    import psutil  # with the trainer, whose ranks ask

    try:
        family, _, _, _, address = tcp.getaddrinfo(host, 1, type=tcp.SOCK_DGRAM)[0]
        with closing(tcp.socket(family, tcp.SOCK_DGRAM)) as asking:
            asking.connect(address)
            own = asking.getsockname()[0].partition("%")[0]
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return name.partition(":")[0]
    return ""
