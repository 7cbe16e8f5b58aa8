"""Numbers and tables as people read them."""

from __future__ import annotations

import math

import pytest

from umbra.services.reporting.tables import (
    aligned,
    clock,
    counts,
    number,
    size,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0, "0"), (0.0, "0"), (7, "7"), (7.0, "7"), (12345, "12,345"),
        (1234.5, "1,234"), (99.96, "100"), (-1234.5, "-1,234"), (0.04567, "0.0457"),
        (1e-7, "1e-07"), (math.inf, "inf"), (math.nan, "nan"),
    ],
)  # fmt: skip
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_size() -> None:
    assert [size(count) for count in (0, 1023, 1536, 16 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "16 MiB", "3 TiB",
    ]  # fmt: skip


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.9, 61, 3725)] == [
        "0:00", "0:59", "1:01", "1:02:05",
    ]  # fmt: skip


def test_counts() -> None:
    assert counts({"stale": 1200, "failed": 0, "cancelled": 2}) == "1,200 stale, 2 cancelled"
    assert counts({}) == ""


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("name", "rate", "note"), ("a", "1,200", ""), ("longer", "3", "slow")]
    assert aligned(rows, right=[1]) == [
        "name     rate  note",
        "a       1,200",
        "longer      3  slow",
    ]
    assert aligned([]) == []
