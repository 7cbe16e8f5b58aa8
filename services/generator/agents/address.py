"""Where agents are served, and who may come."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

from umbra.proto.errors import UsageError
from umbra.services.runtime.http.address import is_local, listen, url_at

KEY_VARIABLE = "UMBRA_AGENT_KEY"
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


def url_of(bound: socket.socket) -> str:
    """The URL at which programs of this host reach the socket."""
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1" if bound.family == socket.AF_INET else "::1"
    return url_at(host, port)


def url_for_others(bound: socket.socket) -> str:
    """The URL at which other machines reach the socket, if any do."""
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    return url_at(host, port)


def read_key(file: str, environ: Mapping[str, str]) -> str:
    """The key that agents have to give: what `file` holds, else the environment variable's.

    Raises:
        UsageError: `file` can't be read or is empty.
    """
    if not file:
        return environ.get(KEY_VARIABLE, "")
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"generator.serve_key: {file} cannot be read: {error}") from error
    if not key:
        raise UsageError(f"generator.serve_key: {file} is empty: write a key into it")
    return key
