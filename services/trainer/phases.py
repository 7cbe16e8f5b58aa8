"""The seconds of a step by phase, and traces of chosen steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger(__name__)

Moment = float | torch.cuda.Event


class Phases:
    """Seconds by phase of the current step; each phase is also a range of torch's profiler.

    A phase within another is a part of it: `train_step/forward`. On a GPU the moments are events in
    the stream of this thread, because the calls return before the kernels have run.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self._clock = clock
        self._open: list[str] = []
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._begin = self._now()

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
            self._spans.append((path, begin, self._now()))

    def take(self) -> dict[str, float]:
        """Return the seconds by phase since the last call, and start again.

        `step` has all of them, and is the sum of its phases and `other`. A phase with parts is the
        sum of these and its own `other`: `train_step/other`.
        """
        begin, spans = self._begin, self._spans
        self._begin, self._spans = self._now(), []
        if self._on_gpu:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for path, first, last in spans:
            seconds[path] = seconds.get(path, 0.0) + _between(first, last)
        whole = _between(begin, self._begin)
        parts: dict[str, float] = {"": 0.0}
        for path, spent in seconds.items():
            parent = path.rpartition("/")[0]
            parts[parent] = parts.get(parent, 0.0) + spent
        top = parts.pop("")
        rest = {f"{parent}/other": seconds[parent] - spent for parent, spent in parts.items()}
        return seconds | rest | {"other": whole - top, "step": whole}

    def _now(self) -> Moment:
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(first: Moment, last: Moment) -> float:
    if isinstance(first, torch.cuda.Event) and isinstance(last, torch.cuda.Event):
        return first.elapsed_time(last) / 1000
    assert isinstance(first, float) and isinstance(last, float)
    return last - first


@dataclass
class Profile:
    """Traces of chosen steps by torch's profiler, which Perfetto (ui.perfetto.dev) opens.

    Each rank writes `<folder>/step-<step>.rank-<rank>.json.gz`; the step that makes version n is
    step n. A trace that cannot be written is logged and left out.
    """

    folder: Path
    steps: Collection[int]
    rank: int = 0
    _step: int = 0
    _running: profile | None = None

    def begin(self, step: int) -> None:
        """Record from here on, if `step` is one of the chosen."""
        if step not in self.steps or self._running is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._step, self._running = step, profile(activities=activities)
        self._running.start()

    def end(self) -> None:
        """Write the recorded trace, if there is one."""
        running, self._running = self._running, None
        if running is None:
            return
        running.stop()
        file = self.folder / f"step-{self._step}.rank-{self.rank}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            log.warning("the trace of step %d was not written: %s", self._step, error)
        else:
            log.info("trace of step %d: %s", self._step, file)
