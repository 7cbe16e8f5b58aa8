"""Keys of a benchmark's processes: all find them in the environment, as services do."""

from __future__ import annotations

from dataclasses import replace

from umbra.proto.access import KeyRole
from umbra.proto.net.keys import Security, open_security
from umbra.services.config.loader import load_config

VARIABLE = "UMBRA_SECURITY__KEYS"
AUTHENTICATE = "UMBRA_SECURITY__ENCRYPT_WEIGHTS"
SOCKET = "UMBRA_BENCH_SOCKET"  # set: hubs have no port for connections, so orders' socket is used


def security_of(role: KeyRole) -> Security:
    """With the keys that `VARIABLE` names, if it does; shaped links are bound in any case."""
    return replace(open_security(load_config().security, [role]), insecure=True)
