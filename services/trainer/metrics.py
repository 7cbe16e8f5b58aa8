"""Metrics of every training step."""

from __future__ import annotations

import math
import resource
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from umbra.proto.records import Trajectory
from umbra.services.config.generation import environment_prefix
from umbra.services.reporting import staleness
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.objectives.objective import TokenInputs, TokenLosses
from umbra.services.trainer.objectives.terms import k3, ratio

Row = dict[str, float | None]


def sample_metrics(batch: TrainBatch, version: int) -> Row:
    """Return rewards, lengths and staleness of a batch that weights of `version` are trained on.

    Staleness is in versions. A response's length sums up all branches of its sample; tokens that
    they share count in each.
    """
    samples, count = batch.samples, len(batch.samples)
    lengths = torch.tensor([t.sample_tokens for t in samples]).double()
    spans = [(t.oldest_version, t.newest_version) for t in samples]
    ages = torch.tensor([staleness(*span, version) for span in spans]).double()  # [samples, 3]
    row: Row = {
        "samples": float(count),
        "tokens": float(batch.tokens.ids.numel()),
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std(correction=0)),
        "reward/min": float(batch.rewards.min()),
        "reward/max": float(batch.rewards.max()),
        "solved": float((batch.rewards >= 1).double().mean()),
        "response_length/mean": float(lengths.mean()),
        "turns": sum(t.turns for t in samples) / count,
        "duplicates": 1 - len({(t.group_id, t.response_ids) for t in samples}) / count,
        "truncated": sum(t.finish_reason == "length" for t in samples) / count,
        "multi_version": sum(newest > oldest for oldest, newest in spans) / count,
        "branches/mean": len(batch.trajectories) / count,
        "branches/max": float(batch.sample.bincount().max()),
    }
    for percent in (50, 90, 99):
        row[f"response_length/p{percent}"] = float(lengths.quantile(percent / 100))
    for name, values in zip(("total", "in_flight", "in_queue"), ages.unbind(1), strict=True):
        row[f"staleness/{name}/mean"] = float(values.mean())
        row[f"staleness/{name}/max"] = float(values.max())
    parts: dict[str, list[float]] = defaultdict(list)
    for trajectory in samples:
        for name, value in trajectory.reward_parts.items():
            parts[name].append(value)
    # Over the samples that have such a part: not all of them call a tool, for example.
    return row | {f"reward_part/{name}": sum(v) / len(v) for name, v in parts.items()}


def environment_metrics(trajectories: Sequence[Trajectory], names: Sequence[str]) -> Row:
    """Return samples, mean reward and mean length of each environment; None of no samples."""
    row: Row = {}
    for name in names:
        members = [t for t in trajectories if t.prompt_id.startswith(environment_prefix(name))]
        row[f"environment/{name}/samples"] = count = float(len(members))
        rewards, lengths = sum(t.reward for t in members), sum(t.sample_tokens for t in members)
        for key, total in (("reward", rewards), ("response_length", lengths)):
            row[f"environment/{name}/{key}"] = total / count if count else None
    return row


# Sums over tokens that `mismatch_row` makes means of; d = log pi - log mu, r = pi / mu.
MISMATCH = ("tokens", "d", "k3", "r", "r2", "on_policy", "on_policy/k3")


def mismatch_sums(
    logprobs: Tensor, behaviour: Tensor, on_policy: Tensor, included: Tensor
) -> Tensor:
    """Return the sums named in `MISMATCH` over N learned tokens, float64, where `logprobs` is.

    `logprobs` are under the weights that the batch found; `on_policy` tokens are of their version
    (`TrainBatch.leading`); tokens that are not `included` do not count.
    """
    on_policy = on_policy & included
    log_ratio = torch.where(included, logprobs - behaviour, 0.0).double()
    weight = ratio(log_ratio, torch.zeros_like(log_ratio)) * included
    apart = k3(torch.zeros_like(log_ratio), log_ratio)
    columns = (included, log_ratio, apart, weight, weight.square(), on_policy, apart * on_policy)
    return torch.stack([column.double().sum() for column in columns])


def mismatch_row(sums: Tensor) -> Row:
    """Return how far the trainer's policy is from the one that sampled; None without tokens.

    With r = pi/mu: k1 = mean(-log r), k3 = mean(r - log r - 1), chi2 = mean(r^2) - 1, and the
    effective share of samples ess = (sum r)^2 / (N sum r^2). On tokens of the current version only
    rounding is left, so `k3_on_policy` (None without such tokens) separates errors of the programs
    from staleness. `sums` are over all ranks.
    """
    total = dict(zip(MISMATCH, sums.tolist(), strict=True))
    count, on_policy = total["tokens"], total["on_policy"]
    return {
        "mismatch/k1": -total["d"] / count if count else None,
        "mismatch/k3": total["k3"] / count if count else None,
        "mismatch/chi2": total["r2"] / count - 1 if count else None,
        "mismatch/k3_on_policy": total["on_policy/k3"] / on_policy if on_policy else None,
        "ess": ess(total["r"], total["r2"], count),
    }


def ess(weights: float, squares: float, count: float) -> float | None:
    """Return (sum r)^2 / (N sum r^2), in (0, 1], with r = pi / mu; None without tokens."""
    return weights**2 / (count * squares) if count else None


def expert_metrics(load: Tensor, rerouted: Tensor | None = None) -> Row:
    """Return how evenly the layers' experts are used; None where no token was routed.

    The load of a layer is its busiest expert's over the mean, its entropy the entropy of the
    experts' shares over the largest there can be (1 = even). An expert is dead without a token.
    `load` counts the tokens of each expert, [layers, experts]; `rerouted` counts tokens that the
    layer's router would have given to another expert than the generator's engine did, [layers].
    """
    total = load.sum(1, keepdim=True)
    share = load / total
    highest = share.amax(1) * load.shape[1]
    entropy = torch.special.entr(share).sum(1) / math.log(max(2, load.shape[1]))
    row: Row = {
        "experts/load/mean": float(highest.mean()),
        "experts/load/max": float(highest.max()),
        "experts/entropy/mean": float(entropy.mean()),
        "experts/entropy/min": float(entropy.min()),
        "experts/dead": float((load == 0).double().mean()) if total.all() else math.nan,
    }
    if rerouted is not None:
        row["experts/rerouted"] = float(rerouted.sum() / load.sum())
    return finite(row)


def peak_memory_gib(device: torch.device) -> float:
    """Return the most that this process ever held at once: on its GPU, or in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def finite(row: Row) -> Row:
    """Return `row` with None for NaN and infinities: JSON has neither."""
    return {k: v if v is None or math.isfinite(v) else None for k, v in row.items()}


# Sums over the tokens that were seen, all epochs.
SUMS: tuple[str, ...] = (
    "tokens", "entropy", "kl", "age", "outliers", "loss", "last", "last/r", "last/r2", "clipped",
    "masked",
)  # fmt: skip
MAXIMA: tuple[str, ...] = ("ratio", "age")


class LossMetrics:
    """The sums over a batch's passes, on the device; the ranks exchange a row of sums each.

    In each epoch a token is seen once on one of the ranks, so sums over the ranks are sums over the
    batch. `logprobs` are those [M] under the weights of `version`, which the batch found, where a
    pass was spent on them; an epoch is cut into `parts` updates, and a version has `per_version`.
    """

    def __init__(
        self,
        batch: TrainBatch,
        logprobs: Tensor | None,
        parts: int,
        updates: int,
        version: int,
        per_version: int,
    ) -> None:
        self._logprobs, self._per_epoch, self._updates = logprobs, parts, updates
        self._age = (version - batch.oldest) * per_version  # [M]
        self._on_policy = batch.leading(version)
        # One vector, so that a pass adds to it and the ranks exchange it at once.
        self._sums = torch.zeros(len(SUMS) + len(MISMATCH), dtype=torch.float64)
        self._maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64)
        self._knows_kl = False

    def add(
        self,
        update: int,
        source: Tensor,
        tokens: TokenInputs,
        result: TokenLosses,
        loss: Tensor,
        outliers: Tensor,
    ) -> None:
        """Add a micro-batch's results; `source` names its tokens, `outliers` [N] are left out."""
        now = tokens.logprobs.detach()
        device = now.device
        self._sums, self._maxima = self._sums.to(device), self._maxima.to(device)
        if not len(source):
            return
        included = ~outliers
        age = self._age[source].to(device) + update
        last = included & (update == self._updates - 1)
        weight = torch.where(last, ratio(now.double(), tokens.behaviour.double()), 0.0)
        columns = {
            "tokens": torch.ones_like(now),
            "entropy": tokens.entropy.detach(),
            "kl": torch.zeros_like(now) if result.kl is None else result.kl,
            "age": age,
            "outliers": outliers,
            "last": last,
            "last/r": weight,
            "last/r2": weight.square(),
            "clipped": result.clipped & included,
            "masked": ~result.kept | outliers,
            "loss": loss.detach(),
        }
        sums = torch.stack([columns[name].double().sum() for name in SUMS])
        self._knows_kl = result.kl is not None
        mismatch = torch.zeros(len(MISMATCH), dtype=torch.float64, device=device)
        if update < (1 if self._logprobs is None else self._per_epoch):
            logprobs = now if self._logprobs is None else self._logprobs[source].to(now)
            on_policy = self._on_policy[source].to(device)
            mismatch = mismatch_sums(logprobs, tokens.behaviour, on_policy, included)
        self._sums += torch.cat([sums, mismatch])
        ratios = torch.where(included, result.ratio.double(), -torch.inf)
        highest = torch.stack([ratios.max(), age.double().max()])
        self._maxima = torch.maximum(self._maxima, highest)

    def summary(self, ranks: Ranks) -> Row:
        """Return means over the trained tokens of all epochs; None where there were none.

        A token is clipped where its gain has no gradient (or its weight is clipped: CISPO), masked
        where it has no gain. Outliers count as masked, and in no ratio. The mismatch to the
        generators is between them and the weights the batch found: it is taken from those weights'
        logprobs, or else from the tokens of the first update. `ess_last`, the effective share of
        samples at the last update, and the staleness counted in updates show the effect of further
        updates.
        """
        # Each rank's sums and maxima: some dozen numbers, however many tokens there are.
        rows = ranks.gather(torch.cat([self._sums, self._maxima]).cpu())
        total = rows[:, : -len(MAXIMA)].sum(0)
        sums = dict(zip(SUMS, total[: len(SUMS)].tolist(), strict=True))
        highest = dict(zip(MAXIMA, rows[:, -len(MAXIMA) :].amax(0).tolist(), strict=True))

        def mean(name: str) -> float | None:
            return sums[name] / sums["tokens"] if sums["tokens"] else None

        row: Row = {
            "loss": sums["loss"] / self._updates if self._updates else None,
            "entropy": mean("entropy"),
            "clip_fraction": mean("clipped"),
            "mask_fraction": mean("masked"),
            "ratio/max": highest["ratio"],
            "outliers": sums["outliers"],
            "kl": mean("kl") if self._knows_kl else None,
            "ess_last": ess(sums["last/r"], sums["last/r2"], sums["last"]),
            "staleness/updates/mean": mean("age"),
            "staleness/updates/max": highest["age"],
        }
        return row | mismatch_row(total[len(SUMS) :])
