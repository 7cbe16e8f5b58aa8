"""Version of the wire protocol, independent of the package's. The spec is README.md here."""

from __future__ import annotations

PROTOCOL_MAJOR = 6
PROTOCOL_MINOR = 0
