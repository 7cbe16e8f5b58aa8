"""What others are told of an address that was bound here."""

from __future__ import annotations

import socket

WILDCARDS = ("*", "0.0.0.0", "[::]")


def reachable(endpoint: str, advertise: str = "") -> str:
    """The bound `endpoint` as others can connect to it.

    Its host becomes `advertise` if that is given, else a wildcard becomes this machine's name.
    """
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    known = advertise or (socket.gethostname() if host in WILDCARDS else host)
    if ":" in known and not known.startswith("["):
        known = f"[{known}]"  # IPv6
    return f"tcp://{known}:{port}"
