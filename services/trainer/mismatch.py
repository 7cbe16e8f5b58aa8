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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from umbra.proto.errors import MismatchError
from umbra.services.config import RunConfig
from umbra.services.modeling.sharded import local
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.distributed.sharding import reshard
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.objectives.terms import k3

CAP = 1.0  # of a token's k3; a log-probability that is not finite counts as much
MIN_TOKENS = 64  # of a generator, until it is judged
LOOKED_AT = 1024  # learned tokens of a generator that a pass of their own is spent on, about

# Bounds by the coarsest format on the way. Rounding alone gives up to 1e-7 in float32 (more where a
# kernel computes in TF32) and about 1e-3 in bfloat16, where 0.03 at the first step was a fault
# (PrimeIntellect-ai/prime-rl, issue 2671).
BOUNDS = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 0.02, "fp8": 0.1}

log = logging.getLogger(__name__)


@dataclass
class Compared:
    """The tokens of one generator that were compared since it was judged last."""

    since: int  # the step at which it was judged, or seen for the first time
    judged: bool = False
    told: bool = False  # that it is not judged
    tokens: int = 0
    total: float = 0.0  # of min(k3, CAP)
    worst: float = 0.0  # the largest k3
    where: str = ""  # the worst token, in words

    @property
    def mismatch(self) -> float:
        """Average min(k3, CAP) over all tokens but the worst."""
        return max(0.0, self.total - min(self.worst, CAP)) / max(1, self.tokens - 1)


class Verdicts:
    """The generators, and the steps at which each is judged: every `every` steps."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._known: dict[str, Compared] = {}

    def due(self, generator: str, step: int) -> bool:
        """True if tokens of `generator`, which is in the batch of `step`, have to be found."""
        known = self._known.setdefault(generator, Compared(step))
        return bool(self._every) and (not known.judged or step - known.since >= self._every)

    def add(self, generator: str, step: int, values: Tensor, where: str) -> Compared | None:
        """Add the k3 of N tokens, the worst of them in words; return the sum if it is enough."""
        known = self._known[generator]
        known.tokens += len(values)
        known.total += float(values.clamp(max=CAP).sum())
        if (worst := float(values.max())) > known.worst:
            known.worst, known.where = worst, where
        if known.tokens < MIN_TOKENS:
            return None
        self._known[generator] = Compared(step, judged=True)
        return known

    def unknown(self, generators: Sequence[str], step: int) -> list[str]:
        """Return generators not judged for three times `every` steps; each of them only once."""
        limit = step - 3 * max(self._every, 1)
        names = [n for n in generators if self._known[n].since <= limit and not self._known[n].told]
        for name in names:
            self._known[name].told = True
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
    """A comparison of a batch's logprobs with `learner`'s; all ranks come to the same verdict.

    It begins with version `begun`. Later ones that a former life made, perhaps with other settings,
    are others than ours: responses that began before are not compared with them.
    """

    def __init__(self, config: RunConfig, learner: Learner, begun: int | None = None) -> None:
        self._learner, self._begun = learner, begun
        self._since = learner.ranks.spread(time.time(), float)
        self._bound, self._format = bound_of(config, learner.device.type)
        self._verdicts = Verdicts(config.trainer.mismatch_every)
        self._aside: _Aside | None = None

    def __call__(self, batch: TrainBatch, version: int) -> Row:
        """Compare the generators that are due, with weights of `version`; return the columns.

        Raises:
            MismatchError: a generator is above the bound.
        """
        begin, ranks = time.perf_counter(), self._learner.ranks
        names = [t.generator or "?" for t in batch.trajectories]
        generators = sorted(set(names))
        due = [name for name in generators if self._verdicts.due(name, version)]
        table = torch.zeros(2, len(batch.behaviour))  # 1 where a token was scored, and its log pi
        leading = self._leading(batch, version)
        lines = _lines_with(leading, batch, names, due)
        self._score(lines, leading, batch, table)
        if self._aside is not None:
            held = self._leading(batch, self._aside.version)
            oldest_version = min(t.spans[0].version for t in batch.trajectories)
            if older := _lines_with(held, batch, names, due):
                self._aside.exchange()
                self._score(older, held, batch, table)
                self._aside.exchange()
            elif not due or oldest_version > self._aside.version:
                self._aside = None  # nothing of it is open, or nothing of it comes any more
        if self._aside is None and {names[line] for line in lines} != set(due):
            self._aside = _Aside(self._learner.model, version)
        seconds = time.perf_counter() - begin
        scored, logprobs = ranks.sum(table)
        values = k3(batch.behaviour.double(), logprobs.double())
        values = torch.where(values.isfinite(), values, math.inf)
        judged: dict[str, Compared] = {}
        for name in generators:
            own = torch.tensor([each == name for each in names])[batch.tokens.owner]
            if len(tokens := (own & (scored > 0)).nonzero().squeeze(1)):
                worst = int(tokens[values[tokens].argmax()])
                where = _describe(batch, worst, float(logprobs[worst]))
                if found := self._verdicts.add(name, version, values[tokens], where):
                    judged[name] = found
        above = [name for name, found in judged.items() if found.mismatch > self._bound]
        if above:
            message = "; ".join(self._sentence(name, judged[name]) for name in above)
            raise MismatchError(f"stopped before step {version + 1}: {message}")
        for name in self._verdicts.unknown(generators, version) if ranks.rank == 0 else ():
            log.warning(
                "step %d: generator %s could not be compared with the trainer for a long time: "
                "no token of it was sampled by weights that the trainer had or kept",
                *(version + 1, name),
            )
        return {
            "mismatch/compared": float(scored.sum()),
            "mismatch/judged": max((found.mismatch for found in judged.values()), default=None),
            "mismatch/seconds": seconds,
        }

    def _leading(self, batch: TrainBatch, version: int) -> Tensor:
        since = 0.0 if self._begun is None or version <= self._begun else self._since
        ours = torch.tensor([t.started_at >= since for t in batch.trajectories])
        return batch.leading(version) & ours[batch.tokens.owner]

    @torch.no_grad()
    def _score(self, lines: list[int], tokens: Tensor, batch: TrainBatch, table: Tensor) -> None:
        """Enter `tokens` (bool [M]) of `lines` into `table`, by the present weights."""
        chosen = torch.tensor(lines, dtype=torch.int64)
        for micro in self._learner.pack(batch.tokens, chosen) if lines else ():
            source = micro.source
            logprobs, _ = self._learner.score(micro, batch.temperature[source], with_entropy=False)
            at = tokens[source].nonzero().squeeze(1)
            table[0, source[at]] = 1.0
            table[1, source[at]] = logprobs[at.to(logprobs.device)].float().cpu()

    def _sentence(self, name: str, result: Compared) -> str:
        return (
            f"generator {name} and the trainer do not agree on equal weights: k3 is "
            f"{result.mismatch:.2g} over {result.tokens} tokens, above {self._bound:g} "
            f"(trainer.max_mismatch, {self._format}); worst at {result.where}. Do both have the "
            "same model code, attention window, tokenizer and temperature, and is its cache of "
            "these weights?"
        )


def _lines_with(
    tokens: Tensor, batch: TrainBatch, names: Sequence[str], due: Sequence[str]
) -> list[int]:
    """Return lines with `tokens` (bool [M]), `LOOKED_AT` for each generator that is `due`.

    They are those with most of them, where a wrong window or a lost cache shows.
    """
    counts = torch.bincount(batch.tokens.owner[tokens], minlength=len(names)).tolist()
    chosen: list[int] = []
    for name in due:
        lines = [line for line, count in enumerate(counts) if count and names[line] == name]
        lines.sort(key=lambda line: -counts[line])
        ends = accumulate(counts[line] for line in lines)
        chosen += [n for n, end in zip(lines, ends, strict=True) if end - counts[n] < LOOKED_AT]
    return sorted(chosen)


def _describe(batch: TrainBatch, token: int, logprob: float) -> str:
    line, position = int(batch.tokens.owner[token]), int(batch.tokens.learned[token])
    trajectory = batch.trajectories[line]
    first = int(batch.tokens.lengths[: line + 1].sum()) - trajectory.response_tokens
    return (
        f"token {position - first} of the response of sample {trajectory.sample_id} (id "
        f"{int(batch.tokens.ids[position])}, version {trajectory.spans[0].version}): "
        f"log-probability {float(batch.behaviour[token]):.4g} by the generator, {logprob:.4g} by "
        "the trainer"
    )


class _Aside:
    """The trained weights of a version in host memory: the bytes that this rank holds of them."""

    def __init__(self, model: nn.Module, version: int) -> None:
        self.version = version
        self._model = model
        self._held = [tensor.cpu().clone() for tensor in self._local()]

    @torch.no_grad()
    def exchange(self) -> None:
        """Change places with the model's weights; twice leaves them, bit for bit, as before."""
        for tensor, held in zip(self._local(), self._held, strict=True):
            current = tensor.cpu().clone()
            tensor.copy_(held)
            held.copy_(current)

    def _local(self) -> list[Tensor]:
        reshard(self._model)
        return [local(p) for p in self._model.parameters() if p.requires_grad]
