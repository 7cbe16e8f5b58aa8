"""What the generator's loop is doing, as spans in the metrics file and figures for the monitor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from umbra.services.generator.engines.engine import CacheFigures
from umbra.services.process.metrics import MetricsFile

_LONGEST_SPAN_S = 1.0  # spans are cut here, so that a long one is seen while it lasts


@dataclass
class _Decoded:
    tokens: int = 0
    steps: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    cache_usage: float = 0.0
    lengths: list[int] = field(default_factory=list)


class Activity:
    """Merges what the loop reports at each turn into contiguous spans.

    A row is `{"kind": "span", "name", "start", "end", ...}`, in seconds since the epoch. "idle" has
    `reason`: "weights", "work" or "environment". "decode" has `tokens` sampled, `steps` (of about
    so many forward passes), `prompt_tokens` given to read and the `lengths` of the turns that
    ended, in tokens; `cached_tokens`, `preemptions` and the
    highest `cache_usage` of the engine's `CacheFigures` meanwhile. "load_weights" has `version`.

    Args:
        metrics: receives the rows.
        clock: seconds since the epoch.
    """

    def __init__(self, metrics: MetricsFile, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._metrics = metrics
        self._current: tuple[str, str] | None = None  # name and reason
        self._start = self._end = clock()
        self._cache = CacheFigures()  # at the end of the last turn
        self._decoded = _Decoded()

    def decoding(
        self,
        started: float,
        tokens: int,
        *,
        steps: float = 0.0,
        prompt_tokens: int = 0,
        lengths: Iterable[int] = (),
        cache: CacheFigures | None = None,
    ) -> bool:
        """The engine was busy from `started` until now, for `tokens`; whether a span was closed.

        `cache` is what the engine says of it now.
        """
        closed = self._extend(("decode", ""), started)
        self._decoded.tokens += tokens
        self._decoded.steps += steps
        self._decoded.prompt_tokens += prompt_tokens
        self._decoded.lengths += lengths
        if cache is not None:
            self._decoded.cached_tokens += cache.cached_tokens - self._cache.cached_tokens
            self._decoded.preemptions += cache.preemptions - self._cache.preemptions
            self._decoded.cache_usage = max(self._decoded.cache_usage, cache.usage)
            self._cache = cache
        return closed

    def idle(self, started: float, reason: str) -> bool:
        """Nothing to do since `started`, for want of `reason`; whether a span was closed."""
        return self._extend(("idle", reason), started)

    def loaded(self, start: float, end: float, version: int) -> None:
        """`version` was loaded within another span."""
        self._metrics.write("span", name="load_weights", start=start, end=end, version=version)

    def close(self) -> None:
        """Write the span that is open."""
        if self._current is not None and self._end > self._start:
            name, reason = self._current
            fields = {"reason": reason} if reason else asdict(self._decoded)
            self._metrics.write("span", name=name, start=self._start, end=self._end, **fields)
        self._current, self._decoded = None, _Decoded()

    def _extend(self, kind: tuple[str, str], started: float) -> bool:
        closed = self._current is not None and (
            self._current != kind or started - self._start >= _LONGEST_SPAN_S
        )
        if closed:
            self.close()
        if self._current is None:
            self._current, self._start = kind, started
        self._end = self.clock()
        return closed
