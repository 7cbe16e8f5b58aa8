"""The tests that docs/faults.md names are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")


def test_every_test_that_is_named_is_there() -> None:
    tests = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/test_*.py")}
    files = set(re.findall(r"test_\w+\.py", PAGE))
    assert files
    assert files <= set(tests)
    names = set(re.findall(r"`(test_\w+)`", PAGE))
    assert names
    defined = {name for text in tests.values() for name in re.findall(r"def (test_\w+)\(", text)}
    assert names <= defined


def test_every_file_of_a_run_has_its_line() -> None:
    """As far as the code names them in one place."""
    section = PAGE.partition("## What is lost with a file")[2].partition("\n## ")[0]
    folder = (ROOT / "deploy" / "files" / "run_folder.py").read_text(encoding="utf-8")
    named = set(re.findall(r'_Below\("([\w.]+)"', folder)) - {"model"}  # which is the result
    assert named
    assert [name for name in sorted(named) if f"`{name}" not in section] == []
