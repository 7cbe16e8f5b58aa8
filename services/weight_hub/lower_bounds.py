"""What the phases of a push cannot be shorter than, on this machine and over this link."""

from __future__ import annotations

import time

from umbra.services.weight_hub.effects import Pushed

SAMPLE_BYTES = 32 << 20
PASSES = 4  # the first one faults the pages in


class LowerBounds:
    """Seconds that each phase would take at the speed of the memory, or of the link.

    A snapshot, staging and a commit are one copy of all bytes each. The speed of memory is measured
    here, once; that of a receiver's link is the best that it has shown so far.
    """

    def __init__(self) -> None:
        self._memory = 0.0  # bytes per second
        self._links: dict[str, float] = {}

    def of(self, pushed: Pushed, plane: str, nbytes: int) -> dict[str, float]:
        """The floors of one push of `nbytes` bytes, as fields of its row."""
        copy_s = nbytes / self._memory_rate()
        wire_s = copy_s
        if plane == "tcp":
            shown = pushed.wire_bytes / pushed.wire_s if pushed.wire_s > 0 else 0.0
            best = self._links[pushed.receiver] = max(shown, self._links.get(pushed.receiver, 0.0))
            wire_s = pushed.wire_bytes / best if best else 0.0
        return {"copy_floor_s": copy_s, "wire_floor_s": wire_s}

    def _memory_rate(self) -> float:
        if not self._memory:
            source, target = bytes(SAMPLE_BYTES), bytearray(SAMPLE_BYTES)
            times: list[float] = []
            for _ in range(PASSES):
                began = time.perf_counter()
                target[:] = source
                times.append(time.perf_counter() - began)
            self._memory = SAMPLE_BYTES / max(min(times), 1e-9)
        return self._memory
