"""What all sections have in common."""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: typed, immutable, unknown keys are refused."""
