"""Fits a `ReplayModel` to what the generators of a run wrote into its metrics.jsonl."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from umbra.proto.errors import UsageError
from umbra.services.generator.replay_model import ReplayModel
from umbra.services.process.metrics import parse_row

_QUANTILES = 101
_LEAST_SPANS = 8  # three numbers are fitted, and a part is left out

Rows = Sequence[Mapping[str, Any]]


def fit_run(folder: Path) -> ReplayModel:
    """The replay model of the run in `folder`, by all its generators.

    Raises:
        UsageError: no metrics there, or too few of a generator that decoded.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UsageError(f"{folder} is no run: it has no metrics.jsonl")
    return fit(_rows(path), str(folder))


def fit(rows: Iterable[Mapping[str, Any]], source: str) -> ReplayModel:
    """Least squares, without negative costs, over the decode spans of `rows`.

    Each span of a second or so is one equation: its seconds are `step_s` for each of its steps,
    `token_s` for each token sampled and `prompt_token_s` for each prompt token read. Every second
    one is left out, and the error of their sum is the `error` of the model.
    """
    decodes: list[Mapping[str, Any]] = []
    loads: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.get("kind") == "span" and row.get("name") == "decode" and row.get("tokens"):
            decodes.append(row)
        elif row.get("kind") == "span" and row.get("name") == "load_weights":
            loads[row["service"]].append((row["start"], row["end"]))
    lengths = [length for row in decodes for length in row["lengths"]]
    if len(decodes) < _LEAST_SPANS or not lengths:
        raise UsageError(
            f"{source}: {len(decodes)} spans of decoding and {len(lengths)} turns are too few to "
            f"fit a replay model to; it takes {_LEAST_SPANS} spans, so let a run decode for longer"
        )
    work = np.array([[r["steps"], r["tokens"], r["prompt_tokens"]] for r in decodes], dtype=float)
    seconds = np.array([_seconds(row, loads[row["service"]]) for row in decodes])
    tried, left_out = slice(0, None, 2), slice(1, None, 2)
    predicted = work[left_out] @ _least_squares(work[tried], seconds[tried])
    step_s, token_s, prompt_token_s = _least_squares(work, seconds)
    return ReplayModel(
        step_s=max(step_s, 1e-9),
        token_s=token_s,
        prompt_token_s=prompt_token_s,
        pause_s=median([end - start for spans in loads.values() for start, end in spans] or [0.0]),
        lengths=np.quantile(lengths, np.linspace(0, 1, _QUANTILES)).tolist(),
        source=source,
        error=abs(float(predicted.sum() / seconds[left_out].sum()) - 1),
    )


def _seconds(row: Mapping[str, Any], loads: Iterable[tuple[float, float]]) -> float:
    """How long a decode span was, without the loading of weights in it."""
    start, end = row["start"], row["end"]
    return end - start - sum(max(0.0, min(end, e) - max(start, s)) for s, e in loads)


def _least_squares(work: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Costs [K], none negative, with which `work` [N, K] comes closest to `seconds` [N].

    K is small, so that every choice of the costs that are not zero can be tried.
    """
    count = work.shape[1]
    best, best_error = [0.0] * count, float("inf")
    choices = itertools.product((True, False), repeat=count)
    for used in (np.flatnonzero(choice) for choice in choices if any(choice)):
        found = np.linalg.lstsq(work[:, used], seconds, rcond=None)[0]
        error = float(np.square(work[:, used] @ found - seconds).sum())
        if (found >= 0).all() and error < best_error:
            best, best_error = [0.0] * count, error
            for place, cost in zip(used.tolist(), found.tolist(), strict=True):
                best[place] = cost
    return best


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.endswith("\n") and '"kind":"span"' in line:
                if (row := parse_row(line)) is not None:
                    yield row
