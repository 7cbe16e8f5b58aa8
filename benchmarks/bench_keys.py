"""Keys of a benchmark's processes: all find them in the environment, as services do."""

from __future__ import annotations

from umbra.proto.access import KeyRole
from umbra.services.runtime.config.loader import load_config
from umbra.services.runtime.net.keys import Security, open_security

VARIABLE = "UMBRA_SECURITY__KEYS"


def security_of(role: KeyRole) -> Security:
    """With the keys that `VARIABLE` names, if it does; shaped links are bound in any case."""
    return Security(open_security(load_config().security, [role]).keys, insecure=True)
