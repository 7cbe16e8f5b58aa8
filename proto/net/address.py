"""Addresses as other processes see them, and the network interface towards another host."""

from __future__ import annotations

import socket
from contextlib import closing

WILDCARDS = ("*", "0.0.0.0", "[::]")
_advertised = ""


def advertise(host: str) -> None:
    """Set the host by which others reach this process (`run.advertise`); empty: the bound one."""
    global _advertised
    _advertised = host


def reachable(endpoint: str) -> str:
    """Return the bound `endpoint` as others can connect to it.

    Its host becomes the advertised one if there is one; else a wildcard becomes this machine's
    name.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    known = _advertised or (socket.gethostname() if host in WILDCARDS else host)
    if ":" in known and not known.startswith("["):
        known = f"[{known}]"  # IPv6
    return f"tcp://{known}:{port}"


def next_port(endpoint: str) -> str:
    """Return the address after `endpoint` on its host; any port if its own is any."""
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + 1}" if port.isdigit() and int(port) else f"{host}:*"


def interface_towards(host: str) -> str:
    """Return the name of the interface whose address this host has in connections to `host`.

    Empty where it cannot be told. Nothing is sent.
    """
    import psutil  # with the trainer, whose ranks ask

    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as asking:
            asking.connect(address)
            own = asking.getsockname()[0].partition("%")[0]
    except OSError:
        return ""
    for name, known in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in known):
            return name.partition(":")[0]
    return ""
