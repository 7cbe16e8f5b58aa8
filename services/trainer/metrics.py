"""What is measured of every training step."""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from umbra.proto.records import Trajectory
from umbra.services.config.generation import environment_prefix
from umbra.services.reporting.figures import staleness
from umbra.services.trainer.batch import TrainBatch
from umbra.services.trainer.objectives.ratios import ratio

Row = dict[str, float | None]


def sample_metrics(batch: TrainBatch, version: int) -> Row:
    """Rewards, lengths and staleness of a batch that weights of `version` are trained on.

    Staleness is that of `runtime.figures.staleness`, in versions. A response's length is that of
    all branches of its sample; what they share counts in each.
    """
    lengths = torch.tensor([t.sample_tokens for t in batch.samples]).double()
    oldest = torch.tensor([t.oldest_version for t in batch.samples])
    newest = torch.tensor([t.newest_version for t in batch.samples])
    spans = zip(oldest.tolist(), newest.tolist(), strict=True)
    ages = torch.tensor([staleness(*span, version) for span in spans]).double()  # [samples, 3]
    row: Row = {
        "samples": float(len(batch.samples)),
        "tokens": float(batch.tokens.ids.numel()),
        "reward/mean": float(batch.rewards.mean()),
        "reward/std": float(batch.rewards.std(correction=0)),
        "reward/min": float(batch.rewards.min()),
        "reward/max": float(batch.rewards.max()),
        "solved": float((batch.rewards >= 1).double().mean()),
        "response_length/mean": float(lengths.mean()),
        "response_length/p50": float(lengths.quantile(0.5)),
        "response_length/p90": float(lengths.quantile(0.9)),
        "response_length/p99": float(lengths.quantile(0.99)),
        "turns": sum(t.turns for t in batch.samples) / len(batch.samples),
        "truncated": _fraction(t.finish_reason == "length" for t in batch.samples),
        "multi_version": float((newest > oldest).double().mean()),
        "branches/mean": len(batch.trajectories) / len(batch.samples),
        "branches/max": float(batch.sample.bincount().max()),
    }
    for name, values in zip(("total", "in_flight", "in_queue"), ages.unbind(1), strict=True):
        row[f"staleness/{name}/mean"] = float(values.mean())
        row[f"staleness/{name}/max"] = float(values.max())
    parts: dict[str, list[float]] = {}
    for trajectory in batch.samples:
        for name, value in trajectory.reward_parts.items():
            parts.setdefault(name, []).append(value)
    # Over the samples that have such a part: not all of them call a tool, for example.
    row.update({f"reward_part/{name}": sum(v) / len(v) for name, v in parts.items()})
    return row


def environment_metrics(trajectories: Sequence[Trajectory], names: Sequence[str]) -> Row:
    """Samples, mean reward and mean response length of each environment of a run with several."""
    row: Row = {}
    for name in names:
        own = [t for t in trajectories if t.prompt_id.startswith(environment_prefix(name))]
        row[f"environment/{name}/samples"] = float(len(own))
        if own:
            row[f"environment/{name}/reward"] = sum(t.reward for t in own) / len(own)
            lengths = sum(t.sample_tokens for t in own)
            row[f"environment/{name}/response_length"] = lengths / len(own)
    return row


# Sums over tokens that `mismatch_row` makes means of; d = log pi - log mu, r = pi / mu.
MISMATCH = ("tokens", "d", "k3", "r", "r2", "on_policy", "on_policy/k3")


def mismatch_sums(
    logprobs: Tensor, behaviour: Tensor, on_policy: Tensor, seen: Tensor | None = None
) -> Tensor:
    """The sums named in `MISMATCH` over N learned tokens, float64, on the device of `logprobs`.

    Args:
        logprobs: log pi [N], with the weights that the batch found.
        behaviour: log mu [N].
        on_policy: bool [N], tokens whose version is that of these weights (`TrainBatch.leading`).
        seen: bool [N], those that count; None: all.
    """
    if seen is None:
        seen = torch.ones_like(on_policy)
    on_policy = on_policy & seen
    log_ratio = torch.where(seen, logprobs - behaviour, 0.0).double()
    weight = ratio(log_ratio, torch.zeros_like(log_ratio)) * seen
    # expm1 keeps the digits that r - 1 loses where r is close to 1.
    k3 = torch.expm1(log_ratio.clamp(max=20.0)) - log_ratio
    columns = (seen, log_ratio, k3, weight, weight.square(), on_policy, k3 * on_policy)
    return torch.stack([column.double().sum() for column in columns])


def mismatch_row(sums: Tensor) -> Row:
    """How far the trainer's policy is from the one that sampled; None without tokens.

    With r = pi/mu: k1 = mean(-log r), k3 = mean(r - log r - 1), chi2 = mean(r^2) - 1, and the
    effective share of samples ess = (sum r)^2 / (N sum r^2). On tokens of the current version only
    rounding is left, so `k3_on_policy` (None without such tokens) tells errors of the programs
    from staleness.

    Args:
        sums: as `mismatch_sums` gives them, of all ranks.
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
    """The effective share of `count` tokens, (sum r)^2 / (N sum r^2) with r = pi / mu; in (0, 1].

    Args:
        weights: sum of r.
        squares: sum of r^2.
        count: N; without any it is None.
    """
    return weights**2 / (count * squares) if count else None


def speed_metrics(tokens: float, operations: float, seconds: float, ceiling: float) -> Row:
    """Tokens per second of the step's training, prompts included; 10^12 operations per second, and
    their share of the `ceiling` (MFU).

    Args:
        ceiling: operations per second that the devices can do; 0 = unknown, and MFU with it.
    """
    return {
        "train_tokens_per_s": tokens / seconds,
        "tflops": operations / seconds / 1e12,
        "mfu": operations / seconds / ceiling if ceiling else None,
    }


def expert_metrics(load: Tensor, rerouted: Tensor | None = None) -> Row:
    """How evenly the layers' experts are used; None where no token was routed.

    The load of a layer is that of its busiest expert over the mean (1 = even), its entropy that of
    the experts' shares over the largest there can be (1 = even). An expert is dead without a token.

    Args:
        load: tokens that each expert was given, [layers, experts].
        rerouted: [layers], tokens that the layer's router would have given to another expert than
            the generator's engine did; None: nothing was replayed.
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
    """The most that this process ever held at once: on its GPU, or in memory without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def finite(row: Row) -> Row:
    """`row` with None for what is not a number: JSON has no NaN."""
    return {k: v if v is None or math.isfinite(v) else None for k, v in row.items()}


def _fraction(flags: Iterator[bool]) -> float:
    values = list(flags)
    return sum(values) / len(values)
