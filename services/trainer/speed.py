"""The speed of a step: seconds by phase, traces of chosen steps, and sizes of passes."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from umbra.services.config import TrainerConfig
from umbra.services.modeling.row_sizes import RowSizes, fitting_tokens, memory_of, rows_within
from umbra.services.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)

Moment = float | torch.cuda.Event


class Phases:
    """Seconds by phase of the current step; each phase is also a range of torch's profiler.

    A phase within another is a part of it: `train_step/forward`. On a GPU the moments are events in
    the stream of this thread, because the calls return before the kernels have run. Nothing is kept
    before the first `take`: a server of the Tinker API never calls it.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_gpu, self._clock = device.type == "cuda", clock
        self._open: list[str] = []
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._begin, self._kept = self._now(), False

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        path = f"{self._open[-1]}/{name}" if self._open else name
        self._open.append(path)
        begin = self._now()
        try:
            with record_function(name):
                yield
        finally:
            self._open.pop()
            if self._kept:
                self._spans.append((path, begin, self._now()))

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, and start again.

        `step` has all of them, and is the sum of its phases and `other`. A phase with parts is the
        sum of these and its own `other`: `train_step/other`.
        """
        begin, spans = self._begin, self._spans
        self._begin, self._spans, self._kept = self._now(), [], True
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for path, first, last in spans:
            seconds[path] += _between(first, last)
        rest: dict[str, float] = {"": _between(begin, self._begin)}
        for path, spent in seconds.items():
            parent = path.rpartition("/")[0]
            rest[parent] = (rest[parent] if parent in rest else seconds[parent]) - spent
        other = {f"{parent}/other".lstrip("/"): spent for parent, spent in rest.items()}
        return seconds | other | {"step": _between(begin, self._begin)}

    def _now(self) -> Moment:
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(first: Any, last: Any) -> float:
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1000


@contextmanager
def traced(file: Path) -> Iterator[None]:
    """Write a trace of the block by torch's profiler, which Perfetto (ui.perfetto.dev) opens.

    One that cannot be written is logged and left out.
    """
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    running = profile(activities=[ProfilerActivity.CPU, *cuda])
    running.start()
    try:
        yield
    finally:
        running.stop()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            log.warning("the trace %s was not written: %s", file, error)
        else:
            log.info("trace of a step: %s", file)


def row_sizes(
    config: TrainerConfig, model: Any, device: torch.device, ranks: Ranks, max_tokens: int = 0
) -> RowSizes:
    """Return the configured sizes; `auto` fits them to model, memory and samples.

    A pass has as many tokens as fit, by `activation_bytes`, into half of the memory that weights
    leave; `rows_within` gives the rows. The rank with the least memory decides for all ranks.
    """
    fits = torch.zeros(1, dtype=torch.int64)
    if config.micro_tokens == "auto":
        memory, kind = memory_of(device, ranks.place.per_host), device.type
        weights = sum(parameter.numel() for parameter in model.parameters())
        fits[0] = fitting_tokens(config, model.config, weights // ranks.world, memory, kind)
        fits = ranks.gather(fits).min()
    return rows_within(config, model.config, int(fits), device.type, max_tokens)
