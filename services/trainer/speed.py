"""The speed of a step: seconds by phase, traces of chosen steps, and floating-point operations."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.architectures import head_widths, layer_kinds
from umbra.services.modeling.attention import FULL, Attention
from umbra.services.modeling.row_sizes import RowSizes, fitting_tokens, memory_of, rows_within
from umbra.services.trainer.distributed.ranks import Ranks

log = logging.getLogger(__name__)

MATRIX = 8192  # rows of the product that gives the ceiling
TRIES = 12
_ROUTED = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")  # names of one thing
Moment = float | torch.cuda.Event


class Phases:
    """Seconds by phase of the current step; each phase is also a range of torch's profiler.

    A phase within another is a part of it: `train_step/forward`. On a GPU the moments are events in
    the stream of this thread, because the calls return before the kernels have run.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_gpu, self._clock = device.type == "cuda", clock
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


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """The operations that a token costs in a model.

    Counted are 6 operations per weight that a token meets (2 forward, 4 backward; only the experts
    that it is routed to; the output layer: per learned token), and 12 per head dimension, head,
    layer and pair of a token and one that it attends to. Weights that an adapter leaves alone count
    like others; states that layers carry do not. Kaplan et al. 2020, arXiv 2001.08361, section 2.1.
    """

    body: int  # weights of the layers
    head: int  # of the output layer
    # Windows in tokens (None: all), each with heads * head dimension, summed over its layers.
    attention: tuple[tuple[int | None, float], ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> TrainingFlops:
        """Count the operations of `model`, which may be sharded or have adapters.

        Raises:
            UsageError: the model's config does not say how many experts a token meets.
        """
        config: Any = model.config.get_text_config()
        head = config.vocab_size * config.hidden_size
        parameters = {n: p for n, p in model.named_parameters() if "embed" not in n}
        body = sum(_met(parameters, config))
        if not config.tie_word_embeddings:
            body -= head
        windows = dict(Attention.of(config).windows)
        kinds = layer_kinds(config) or [*windows] * config.num_hidden_layers
        kinds = [FULL if kind == "hybrid" else kind for kind in kinds]
        layers = Counter(windows[kind] for kind in kinds if kind in windows)
        heads = getattr(config, "num_attention_heads", 0)
        width = heads * sum(head_widths(config)) / 2 if heads else 0
        return cls(body, head, tuple((window, width * n) for window, n in layers.items()))

    def sequence(self, start: int, end: int, learned: int) -> float:
        """Count both passes over positions [start, end) of a sequence, some of them learned."""
        pairs = sum(
            width * (_pairs(end, window) - _pairs(start, window))
            for window, width in self.attention
        )
        return 6 * self.body * (end - start) + 6 * self.head * learned + 12 * pairs


def _pairs(count: int, window: int | None) -> int:
    """Return how many keys the first `count` positions of a sequence attend to, together."""
    near = count if window is None else min(count, window)
    return near * (near + 1) // 2 + (count - near) * near


def _met(parameters: dict[str, nn.Parameter], config: Any) -> Iterator[int]:
    """Return how many elements of each parameter a token is multiplied with, in the mean."""
    stacked = [len(p) for name, p in parameters.items() if ".experts." in name and p.dim() == 3]
    single = {match[1] for name in parameters if (match := re.search(r"\.experts\.(\d+)\.", name))}
    experts = stacked[0] if stacked else len(single)
    counts = [value for key in _ROUTED if isinstance(value := getattr(config, key, None), int)]
    if experts and not counts:
        raise UsageError(
            f"model.path: the config of a {config.model_type} does not say how many experts a "
            f"token meets (none of {', '.join(_ROUTED)})"
        )
    routed = counts[0] if experts else 0
    for name, parameter in parameters.items():
        count = parameter.numel()
        yield count * routed // experts if ".experts." in name else count  # adapters included


def ceiling(device: torch.device) -> float:
    """Measure operations per second of a bf16 product of large matrices, the best of a few."""
    a = torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16)
    best = float("inf")
    for _ in range(TRIES):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.mm(a, a)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begin)
    del a
    torch.cuda.empty_cache()  # the model needs the room
    return 2 * MATRIX**3 / best


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
