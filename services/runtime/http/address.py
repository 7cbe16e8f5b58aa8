"""Addresses that an HTTP server listens at."""

from __future__ import annotations

import errno
import socket

from umbra.proto.errors import StartupError, UsageError
from umbra.services.runtime.keys import is_loopback


def parse_address(text: str, what: str, default_host: str = "") -> tuple[str, int]:
    """`HOST:PORT`, or `:PORT` if there is a default host; `what` names the flag or key.

    Raises:
        UsageError: it is neither.
    """
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or default_host
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        form = ":PORT or HOST:PORT" if default_host else "HOST:PORT"
        raise UsageError(f"{what} {text}: write it as {form}")
    return host, int(port)


def listen(host: str, port: int, *, ports: int = 1) -> socket.socket:
    """A socket that listens at the first free port of `port`, `port + 1`, ... (0: at any).

    Raises:
        StartupError: none is free, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(port + ports - 1, 65535) if port else 0
    for candidate in range(port, last + 1):
        try:
            return socket.create_server((host, candidate), family=family, backlog=1024)
        except OSError as error:
            if candidate == last or error.errno != errno.EADDRINUSE:
                raise StartupError(
                    f"cannot listen on {host}:{candidate}: {error.strerror}"
                    + (f", nor on the ports from {port} on" if candidate > port else "")
                ) from error
    raise AssertionError("there is at least one port")


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine can connect to the socket."""
    return is_loopback(bound.getsockname()[0])


def url_at(host: str, port: int) -> str:
    """The URL of a server there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
