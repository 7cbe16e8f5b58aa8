"""Numbers and tables as people read them."""

from __future__ import annotations

import math

import pytest

from umbra.services.reporting.tables import (
    aligned,
    clock,
    counts,
    facts,
    markdown,
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


def test_number_with_more_digits() -> None:
    assert number(123.456, digits=4) == "123.5"
    assert number(123456.7, digits=4) == "123,457"


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


def test_a_row_that_lacks_a_cell_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        aligned([("a", "b"), ("c",)])


def test_facts_without_a_value_are_left_out() -> None:
    assert facts([("steps", "3"), ("failures", ""), ("staleness", "1")]) == [
        "steps      3",
        "staleness  1",
    ]


def test_markdown() -> None:
    assert markdown(["mode", "rate"], [["sync", "1"], ["async", "2"]]) == (
        "| mode | rate |\n|---|---|\n| sync | 1 |\n| async | 2 |"
    )
