"""How much memory there is for the processes of this host, or of the container that they are in."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_bytes() -> int:
    """The host's memory, or what the container may take of it if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = CGROUP_LIMIT.read_text(encoding="ascii").strip() if CGROUP_LIMIT.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total
