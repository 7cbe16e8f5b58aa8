"""The mutation driver changes what it says, and its page says what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutation.json"
SOURCE = '''
"""Text that is left alone."""
LIMIT = 3
WAIT_S = 2.5
def clip(values: list[int], low: int = 0) -> int | None:
    """And this."""
    assert low < LIMIT
    log.info("%d values", len(values))
    total = 0
    for value in values:
        if value >= low and not value == 7:
            total += min(value, LIMIT)
            seen.append(value)
    return total or None
'''


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_what_is_changed_and_what_is_left_alone() -> None:
    from mutants import mutants

    found = mutants("clip.py", SOURCE)
    assert [(mutant.line, mutant.what) for mutant in found] == [
        (3, "3 -> 4"),
        (5, "0 -> 1"),
        (9, "0 -> 1"),
        (11, "value >= low and (not value == 7) -> value >= low or not value == 7"),
        (11, "value >= low -> value > low"),
        (11, "not value == 7 -> value == 7"),
        (11, "value == 7 -> value != 7"),
        (11, "7 -> 8"),
        (12, "total += min(value, LIMIT) -> total -= min(value, LIMIT)"),
        (12, "dropped: total += min(value, LIMIT)"),
        (12, "min(value, LIMIT) -> max(value, LIMIT)"),
        (13, "dropped: seen.append(value)"),
        (14, "total or None -> total and None"),
    ]
    for mutant in found:
        compile(mutant.apply(SOURCE), "clip.py", "exec")


def test_a_mutant_is_the_change_that_it_says() -> None:
    from mutants import mutants

    names: dict[str, Any] = {"log": type("Log", (), {"info": lambda *_: None}), "seen": []}
    outcomes: dict[str, Any] = {}
    for mutant in mutants("clip.py", SOURCE):
        exec(mutant.apply(SOURCE), names)
        outcomes[mutant.what] = names["clip"]([1, 7, 5])
    assert outcomes["min(value, LIMIT) -> max(value, LIMIT)"] == 3 + 5
    assert outcomes["7 -> 8"] == 1 + 3 + 3
    assert outcomes["dropped: total += min(value, LIMIT)"] is None


def test_a_mutant_is_tried_against_the_tests_that_run_it() -> None:
    from mutants import mutants
    from mutation import Ran

    text = "LIMIT = 1\ndef f():\n    return 2\n@cache\ndef g():\n    return 3\n"
    lines = {"a": {"x.py": [3]}, "b": {"x.py": [6]}, "c": {"y.py": [3]}, "broken": {"x.py": [3]}}
    ran = Ran({"a": 2.0, "b": 1.0, "c": 3.0, "broken": 0.0}, lines, ["broken"])
    assert {mutant.what: ran.covering(mutant, text) for mutant in mutants("x.py", text)} == {
        "1 -> 2": ["b", "a", "c"],  # run by the import alone
        "2 -> 3": ["a"],
        "3 -> 4": ["b", "a"],  # run by the first test that needs it
    }


def test_the_interval_is_wilsons() -> None:
    from mutation import interval

    assert interval(95, 100) == pytest.approx((0.8883, 0.9785), abs=1e-4)
    assert interval(0, 0) == (0.0, 1.0)
    assert interval(10, 10)[1] == 1.0


def test_the_page_says_what_was_found() -> None:
    from mutation import table

    page = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert table(found) in page, "python tools/mutation.py --table"
