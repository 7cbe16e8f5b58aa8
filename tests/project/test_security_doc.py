"""docs/security.md names a test for each line of what peers can do."""

import re
from pathlib import Path

import pytest

from umbra.proto.access import KEY_ROLES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("title", ["What a key can do at worst", "HTTP"])
def test_each_line_has_its_test(title: str) -> None:
    section = PAGE.partition(f"### {title}\n")[2].partition("\n#")[0].partition("\n\nFloods")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(lines) >= 10
    for line in lines:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", line)
        assert named, line
        for path, test in named:
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)


def test_all_roles_are_told_of() -> None:
    assert all(f"`{role}`" in PAGE for role in KEY_ROLES)
