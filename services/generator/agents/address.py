"""Where agents are served, and who may come."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from umbra.proto.errors import UsageError
from umbra.services.http import KEY_VARIABLE, is_local, listen, url_at

_PORTS_TRIED = 64
_ANY_PORT = "127.0.0.1:0"


def bind(address: str, key: str) -> socket.socket:
    """A listening socket at HOST:PORT, or at the first port after it that is free.

    Several generators on one host can so be given the same address. "" is any port of this host.

    Raises:
        UsageError: not an address, or one that others reach while there is no key.
        StartupError: no port is free.
    """
    bound = listen(address or _ANY_PORT, "generator.serve =", ports=_PORTS_TRIED)
    if not key and not is_local(bound):
        bound.close()
        raise UsageError(
            f"generator.serve = {address} is reached from other machines: set {KEY_VARIABLE}, or "
            "generator.serve_key to a file with a key, or use 127.0.0.1"
        )
    return bound


def url_of(bound: socket.socket, advertise: str = "") -> str:
    """The URL at which agents reach the socket.

    Args:
        bound: listens.
        advertise: HOST or HOST:PORT to tell them instead of its own; the port is its own if there
            is none.

    Raises:
        UsageError: `advertise` is neither.
    """
    host, port = bound.getsockname()[:2]
    if advertise:
        name, told = _split(advertise)
        return url_at(name, told or port)
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if bound.family == socket.AF_INET else "::1"
    return url_at(host, port)


def host_of(advertise: str) -> str:
    """The HOST of `generator.serve_advertise`; "" if that is empty."""
    return _split(advertise)[0] if advertise else ""


def _split(advertise: str) -> tuple[str, int]:
    parts = urlsplit(f"//{advertise}")
    with suppress(ValueError):
        if parts.hostname and parts.netloc == advertise and "@" not in advertise:
            return parts.hostname, parts.port or 0
    raise UsageError(f"generator.serve_advertise = {advertise}: write it as HOST or HOST:PORT")
