"""Which network interface leads to another host."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

_SIOCGIFCONF = 0x8912
_IFREQ = struct.Struct("16s16s8x")  # struct ifreq of 64-bit Linux: name, socket address
_ROOM = 4096 * _IFREQ.size


def interface_towards(host: str) -> str:
    """The name of the interface whose address this host has in connections to `host`.

    Empty where it cannot be told. Nothing is sent.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with closing(socket.socket(family, socket.SOCK_DGRAM)) as asking:
            asking.connect(address)
            own = ipaddress.ip_address(asking.getsockname()[0].partition("%")[0])
        found = _ipv4() if own.version == 4 else _ipv6()
        return next((name for name, known in found if known == own), "")
    except OSError:
        return ""


def _ipv4() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    room = array.array("B", bytes(_ROOM))
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as asking:
        request = struct.pack("iP", _ROOM, room.buffer_info()[0])  # struct ifconf
        size, _ = struct.unpack("iP", fcntl.ioctl(asking.fileno(), _SIOCGIFCONF, request))
    for name, known in _IFREQ.iter_unpack(room.tobytes()[:size]):
        label = name.partition(b"\0")[0].decode()
        yield label.partition(":")[0], ipaddress.IPv4Address(known[4:8])


def _ipv6() -> Iterator[tuple[str, ipaddress.IPv6Address]]:
    for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
        known, *_, name = line.split()
        yield name, ipaddress.IPv6Address(bytes.fromhex(known))
