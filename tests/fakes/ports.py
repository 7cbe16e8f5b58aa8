"""Ports of this machine on which something will listen later."""

from __future__ import annotations

import socket


def reserved_port() -> socket.socket:
    """A port that nobody else is given while this is open, and on which one may listen beside it.

    The kernel gives it to nobody who asks for any port, and lets a socket that may share its
    address listen beside one that does not listen. Others run on this machine: a port that was
    merely free a moment ago may be theirs.
    """
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    return port
