"""Compare generators with the trainer on equal weights, and stop the run where they differ.

The figure of a generator is the mean over its tokens of min(k3, 1), without the worst token, where
k3 = r - log r - 1 and r = pi / mu. One outlier alone never decides (the update leaves it out), and
a fault that hits few tokens counts in full, which it would not in a median.

A token is compared under the version that sampled its response from the beginning on
(`TrainBatch.leading`), by a pass without gradient before the update. Where generation runs ahead
there may never be a token of the version that the trainer is at. Then its weights are kept aside,
in host memory, until a batch has tokens of them; they change places with the current ones for that
one pass, and are let go.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from umbra.proto.errors import MismatchError
from umbra.services.config import RunConfig
from umbra.services.modeling.sharded import local
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.sharding import reshard
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row

CAP = 1.0  # of a token's k3; a log-probability that is not finite counts as much
MIN_TOKENS = 64  # of a generator, until it is judged
LOOKED_AT = 1024  # learned tokens of a generator that a pass of their own is spent on, about

# Bounds by the coarsest format on the way. Rounding alone gives up to 1e-7 in float32 (more where a
# kernel computes in TF32) and about 1e-3 in bfloat16, where 0.03 at the first step was a fault
# (PrimeIntellect-ai/prime-rl, issue 2671).
BOUNDS = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 0.02, "fp8": 0.1}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Compared:
    """The mismatch found in one generator's tokens."""

    tokens: int = 0
    total: float = 0.0  # of min(k3, CAP)
    worst: float = 0.0  # the largest k3
    where: str = ""  # the worst token, in words

    def __add__(self, other: Compared) -> Compared:
        worse = max(self, other, key=lambda one: one.worst)
        tokens, total = self.tokens + other.tokens, self.total + other.total
        return Compared(tokens, total, worse.worst, worse.where)

    @property
    def mismatch(self) -> float:
        """Average min(k3, CAP) over all tokens but the worst."""
        if self.tokens < 2:
            return 0.0
        return max(0.0, self.total - min(self.worst, CAP)) / (self.tokens - 1)


class Verdicts:
    """The mismatch of every generator, and the steps at which it is checked: each `every` steps."""

    def __init__(self, bound: float, every: int) -> None:
        self._bound = bound
        self._every = every
        self._open: dict[str, Compared] = {}  # too few tokens so far
        self._since: dict[str, int] = {}  # when it was judged, or seen for the first time
        self._judged: set[str] = set()
        self._told: set[str] = set()

    def due(self, generator: str, step: int) -> bool:
        """True if tokens of `generator`, which is in the batch of `step`, have to be found."""
        since = self._since.setdefault(generator, step)
        return bool(self._every) and (generator not in self._judged or step - since >= self._every)

    def add(
        self, compared: dict[str, Compared], step: int
    ) -> tuple[float | None, dict[str, Compared]]:
        """Return the largest figure of those that can be judged now, and who is above the bound."""
        largest: float | None = None
        above: dict[str, Compared] = {}
        for name, result in compared.items():
            known = self._open.pop(name, Compared()) + result
            if known.tokens < MIN_TOKENS:
                self._open[name] = known
                continue
            self._since[name] = step
            self._judged.add(name)
            self._told.discard(name)
            largest = max(largest or 0.0, known.mismatch)
            if known.mismatch > self._bound:
                above[name] = known
        return largest, above

    def unknown(self, generators: list[str], step: int) -> list[str]:
        """Return generators not judged for three times `every` steps; each of them only once."""
        limit = 3 * max(self._every, 1)
        overdue = [name for name in generators if step - self._since.get(name, step) >= limit]
        names = [name for name in overdue if name not in self._told]
        self._told.update(names)
        return names


def bound_of(config: RunConfig, kind: str) -> tuple[float, str]:
    """Return `trainer.max_mismatch`, or the bound of the coarsest format on the way, and its name.

    `kind` is the trainer's device. A generator computes in the dtype that the trainer serves, or
    refuses to (`check_served_dtype`).
    """
    arguments = config.generator.engine_args
    formats = {config.weight_hub.dtype_on(kind), config.trainer.computes_in(kind)}
    if arguments.get("quantization") or "fp8" in str(arguments.get("kv_cache_dtype", "")):
        formats.add("fp8")
    coarsest = max(formats, key=lambda name: BOUNDS[name])
    return config.trainer.max_mismatch or BOUNDS[coarsest], coarsest


class MismatchCheck:
    """A comparison of a batch's logprobs with `learner`'s; all ranks come to the same verdict."""

    def __init__(self, config: RunConfig, learner: Learner) -> None:
        self._learner = learner
        self._bound, self._format = bound_of(config, learner.device.type)
        self._verdicts = Verdicts(self._bound, config.trainer.mismatch_every)
        self._aside: _Aside | None = None

    def __call__(self, batch: TrainBatch, version: int) -> Row:
        """Compare the generators that are due, with weights of `version`; return the columns."""
        begin = time.perf_counter()
        comparison = _Comparison(batch)
        due = [name for name in comparison.generators if self._verdicts.due(name, version)]
        leading = batch.leading(version)
        self._look(comparison, leading, due)
        if self._aside is not None:
            held = batch.leading(self._aside.version)
            oldest_version = min(t.spans[0].version for t in batch.trajectories)
            if len(comparison.chosen(held, due)):
                with self._aside.in_place():
                    self._look(comparison, held, due)
            elif not due or oldest_version > self._aside.version:
                self._aside = None  # nothing of it is open, or nothing of it comes any more
        blind = any(not len(comparison.chosen(leading, [name])) for name in due)
        if blind and self._aside is None:
            self._aside = _Aside(self._learner, version)
        seconds = time.perf_counter() - begin
        results = comparison.found(self._learner.ranks)
        largest, above = self._verdicts.add(results, version)
        if above:
            message = "; ".join(self._sentence(*each) for each in sorted(above.items()))
            raise MismatchError(f"stopped before step {version + 1}: {message}")
        for name in self._verdicts.unknown(comparison.generators, version):
            if self._learner.ranks.rank == 0:
                log.warning(
                    "step %d: generator %s could not be compared with the trainer for a long time: "
                    "no token of it was sampled by weights that the trainer had or kept",
                    version + 1,
                    name,
                )
        return {
            "mismatch/compared": float(sum(result.tokens for result in results.values())),
            "mismatch/judged": largest,
            "mismatch/seconds": seconds,
        }

    @torch.no_grad()
    def _look(self, comparison: _Comparison, tokens: Tensor, due: list[str]) -> None:
        """Score `tokens` (bool [M]) of the generators that are `due`, by the weights."""
        chosen, batch = comparison.chosen(tokens, due), comparison.batch
        for micro in self._learner.pack(batch.tokens, chosen) if len(chosen) else ():
            source = micro.source
            logprobs, _ = self._learner.score(micro, batch.temperature[source], with_entropy=False)
            at = tokens[source].nonzero().squeeze(1)
            comparison.seen.append((source[at], logprobs[at.to(logprobs.device)]))

    def _sentence(self, name: str, result: Compared) -> str:
        return (
            f"generator {name} and the trainer do not agree on equal weights: k3 is "
            f"{result.mismatch:.2g} over {result.tokens} tokens, above {self._bound:g} "
            f"(trainer.max_mismatch, {self._format}); worst at {result.where}. Do both have the "
            "same model code, attention window, tokenizer and temperature, and is its cache of "
            "these weights?"
        )


class _Comparison:
    """One batch, and the logprobs by the trainer that were found of its tokens."""

    def __init__(self, batch: TrainBatch) -> None:
        self.batch = batch
        names = [t.generator or "?" for t in batch.trajectories]
        self.generators = sorted(set(names))
        self._of_line = torch.tensor([self.generators.index(name) for name in names])
        self.seen: list[tuple[Tensor, Tensor]] = []  # indices [N], logprobs [N] on the device

    def chosen(self, tokens: Tensor, generators: list[str]) -> Tensor:
        """Return lines with `tokens` (bool [M]), `LOOKED_AT` for each of `generators`.

        They are those with most of them, where a wrong window or a lost cache shows.
        """
        counts = torch.bincount(self.batch.tokens.owner[tokens], minlength=len(self._of_line))
        chosen: list[int] = []
        for name in generators:
            lines = ((self._of_line == self.generators.index(name)) & (counts > 0)).nonzero()
            lines = lines.squeeze(1)
            lines = lines[counts[lines].argsort(descending=True, stable=True)]
            offsets = counts[lines].cumsum(0) - counts[lines]
            chosen += lines[offsets < LOOKED_AT].tolist()
        return torch.tensor(sorted(chosen), dtype=torch.int64)

    def found(self, ranks: Ranks) -> dict[str, Compared]:
        """Compare the tokens of all ranks; return the outcome by generator, on every rank."""
        results: dict[str, Compared] = {}
        table = torch.zeros(2, len(self.batch.behaviour))  # whether seen, log pi
        for source, logprobs in self.seen:
            table[0, source] = 1.0
            table[1, source] = logprobs.float().cpu()
        scored, logprobs = ranks.sum(table)
        log_ratio = (logprobs - self.batch.behaviour).double()
        k3 = torch.expm1(log_ratio.clamp(max=20.0)) - log_ratio
        k3 = torch.where(k3.isfinite(), k3, math.inf)
        of_token = self._of_line[self.batch.tokens.owner]
        for number, name in enumerate(self.generators):
            tokens = ((scored > 0) & (of_token == number)).nonzero().squeeze(1)
            if len(tokens):
                values = k3[tokens]
                token = int(tokens[values.argmax()])
                where = self._describe(token, float(logprobs[token]))
                total = float(values.clamp(max=CAP).sum())
                results[name] = Compared(len(tokens), total, float(values.max()), where)
        return results

    def _describe(self, token: int, logprob: float) -> str:
        batch = self.batch
        line = int(batch.tokens.owner[token])
        trajectory, position = batch.trajectories[line], batch.tokens.learned[token]
        end = int(batch.tokens.lengths[: line + 1].sum())
        return (
            f"token {int(position) - (end - trajectory.response_tokens)} of the response of sample "
            f"{trajectory.sample_id} (id {int(batch.tokens.ids[position])}, version "
            f"{trajectory.spans[0].version}): log-probability {float(batch.behaviour[token]):.4g} "
            f"by the generator, {logprob:.4g} by the trainer"
        )


class _Aside:
    """The trained weights of a version in host memory: the bytes that this rank holds of them."""

    def __init__(self, learner: Learner, version: int) -> None:
        self.version = version
        self._model = learner.model
        self._held = [tensor.cpu().clone() for tensor in self._local()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the model at this version; afterwards it is, bit for bit, as before."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        reshard(self._model)
        for tensor, held in zip(self._local(), self._held, strict=True):
            current = tensor.cpu().clone()
            tensor.copy_(held)
            held.copy_(current)

    def _local(self) -> Iterator[Tensor]:
        return (local(p) for p in self._model.parameters() if p.requires_grad)
