"""Version of the wire protocol; its own number, independent of the package's. See README.md here."""

from __future__ import annotations

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0
