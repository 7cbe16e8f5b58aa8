"""Addresses that an HTTP server listens at."""

from __future__ import annotations

import errno
import socket

from umbra.proto.errors import StartupError, UsageError
from umbra.proto.net.keys import is_loopback

_MOST = 65535


def listen(address: str, what: str, *, default_host: str = "", ports: int = 1) -> socket.socket:
    """A socket that listens at `HOST:PORT`, or at the first free one of so many ports.

    Args:
        address: port 0 is any that is free.
        what: the flag or key that says it, for errors.
        default_host: of an address that is `:PORT`.
        ports: to try, from the given one on.

    Raises:
        UsageError: it is no address.
        StartupError: no port is free, or the host is not this machine.
    """
    host, separator, first = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or default_host
    if not separator or not host or not first.isdecimal() or int(first) > _MOST:
        form = ":PORT or HOST:PORT" if default_host else "HOST:PORT"
        raise UsageError(f"{what} {address}: write it as {form}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    port = int(first)
    last = min(port + ports - 1, _MOST) if port else 0
    while True:
        try:
            return socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == last:
                raise StartupError(
                    f"{what} {address}: cannot listen on {host}:{port}: {error.strerror}"
                ) from error
            port += 1


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine can connect to the socket."""
    return is_loopback(bound.getsockname()[0])


def url_at(host: str, port: int) -> str:
    """The URL of a server there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
