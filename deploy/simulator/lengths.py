"""How long answers are, as evenly spaced quantiles."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from umbra.proto.errors import UsageError

QUANTILES = 2001
_Tokens = Annotated[float, Meta(ge=1)]


class _LengthModel(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True
):
    """Base of all distributions; `kind` says which one it is."""


class Uniform(_LengthModel, frozen=True, kw_only=True, tag="uniform"):
    """All lengths from `least` to `most` alike."""

    least: _Tokens
    most: _Tokens


class LogNormal(_LengthModel, frozen=True, kw_only=True, tag="lognormal"):
    """A log-normal distribution, cut off at `most`, where what is longer ends."""

    median: _Tokens
    sigma: Annotated[float, Meta(ge=0)]
    most: _Tokens


class LongTail(_LengthModel, frozen=True, kw_only=True, tag="long-tail"):
    """Most lengths are from `least` to `most`; a share of them from there to `longest`."""

    least: _Tokens
    most: _Tokens
    longest: _Tokens
    share: Annotated[float, Meta(ge=0, le=1)]


class Listed(_LengthModel, frozen=True, kw_only=True, tag="file"):
    """Lengths that were measured: a JSON list of numbers, in any order."""

    path: str


Lengths: TypeAlias = Uniform | LogNormal | LongTail | Listed


def quantiles(lengths: Lengths, folder: Path) -> list[float]:
    """Evenly spaced quantiles of `lengths`, from the least to the most; files are in `folder`.

    Raises:
        UsageError: the distribution is turned around, or its file is no list of lengths.
    """
    shares = [index / (QUANTILES - 1) for index in range(QUANTILES)]
    match lengths:
        case Uniform(least=least, most=most):
            _check_order(least, most, "least", "most")
            return [least, most]
        case LogNormal(median=median, sigma=sigma, most=most):
            _check_order(median, most, "median", "most")
            normal = NormalDist(0.0, 1.0)
            inner = [min(max(share, 0.5 / QUANTILES), 1 - 0.5 / QUANTILES) for share in shares]
            logs = [math.exp(sigma * normal.inv_cdf(share)) for share in inner]
            return [max(1.0, min(most, median * factor)) for factor in logs]
        case LongTail(least=least, most=most, longest=longest, share=tail):
            _check_order(least, most, "least", "most")
            _check_order(most, longest, "most", "longest")
            body = 1 - tail
            return [
                least + (most - least) * share / body
                if share < body
                else most + (longest - most) * (share - body) / max(tail, 1e-12)
                for share in shares
            ]
        case Listed(path=path):
            return _read(folder / path)


def _check_order(less: float, more: float, low: str, high: str) -> None:
    if less > more:
        raise UsageError(f"samples.lengths: {low} = {less:g} is above {high} = {more:g}")


def _read(path: Path) -> list[float]:
    try:
        values = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), list[_Tokens])
    except OSError as error:
        raise UsageError(
            f"samples.lengths.path: {path} cannot be read: {error.strerror}"
        ) from error
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"samples.lengths.path: {path} is no list of lengths: {error}") from error
    if not values:
        raise UsageError(f"samples.lengths.path: {path} has no lengths")
    return sorted(values)
