"""Check the walk of a trajectory in docs/architecture.md against the code, and count it.

    python .ci/walks.py

A row of the table names its hops, a file and functions in it. The numbers have to follow each
other, the functions have to be where the row says, and the sentence above the table has to give the
sums.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"\| (\d+)(?:-(\d+))? \| `([\w/]+\.py)` ([^|]*) \|")
SUMS = re.compile(r"\*\*A trajectory, .*?: (\d+) hops in (\d+) files", re.DOTALL)


def definitions(tree: ast.AST, prefix: str = "") -> set[str]:
    """The functions and methods of a module, by name and by `Class.name`."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= {node.name, prefix + node.name}
        if isinstance(node, ast.ClassDef):
            found |= definitions(node, f"{node.name}.")
    return found


def findings(page: str, root: Path) -> tuple[list[str], int, int]:
    """What is wrong with the walk on `page`; its hops, and its files."""
    faults: list[str] = []
    files: set[str] = set()
    hops = 0
    for first, last, name, words in ROW.findall(page):
        functions = re.findall(r"`([\w.]+)`", words.partition("(or")[0])
        begin, end = int(first), int(last or first)
        if begin != hops + 1 or end - begin + 1 != len(functions):
            numbers = f"hops {begin} to {end} after {hops}"
            faults.append(f"{name}: {numbers}, for {len(functions)} names")
        hops = end
        files.add(name)
        path = next((p for p in (root / "services" / name, root / name) if p.is_file()), None)
        if path is None:
            faults.append(f"{name}: there is no such file")
            continue
        known = definitions(ast.parse(path.read_text(encoding="utf-8")))
        faults += [f"{name}: it has no {one}" for one in functions if one not in known]
    told = SUMS.search(page)
    if told is None or (int(told[1]), int(told[2])) != (hops, len(files)):
        faults.append(f"it is {hops} hops in {len(files)} files, which the page does not say")
    return faults, hops, len(files)


def main() -> int:
    """Print what is wrong, and the sums; 1 if anything is."""
    faults, hops, files = findings(PAGE.read_text(encoding="utf-8"), ROOT)
    for fault in faults:
        print(fault)
    print(f"a trajectory, from the engine's token to the loss: {hops} hops in {files} files")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
