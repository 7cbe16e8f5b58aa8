"""The walks of docs/architecture.md lead through functions that there are, and are short."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def walk(title: str) -> list[tuple[str, str]]:
    part = PAGE.partition(f"\n### {title}\n")[2].partition("\n##")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \| .+ \|$", part, re.M)


@pytest.mark.parametrize(
    ("title", "most_hops", "most_files"), [("A trajectory", 28, 20), ("A version", 20, 12)]
)
def test_a_walk_is_short_and_each_hop_is_there(title: str, most_hops: int, most_files: int) -> None:
    hops = walk(title)
    files = {file for file, _ in hops}
    assert 10 < len(hops) <= most_hops and len(files) <= most_files
    defined = {
        file: {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef)
        }
        for file in files
    }
    assert [hop for hop in hops if hop[1] not in defined[hop[0]]] == []
