"""Print files, lines and public names of each folder beside its budget; fail where one is exceeded.

Every line of Python counts. Public names are functions and classes at the top level of a module
whose names do not begin with an underscore. A folder that grows for a reason gets a larger budget
here, with the reason in the commit. No file may have more than 600 lines.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES = 600
PRODUCTION = ("deploy", "proto", "services", "src")

# folder: lines, public names
BUDGETS: dict[str, tuple[int, int]] = {
    "proto": (3_333, 149),
    "services": (721, 28),
    "services/buffer": (4_435, 67),
    "services/config": (2_073, 51),
    "services/environments": (2_990, 77),
    "services/generator": (7_053, 121),
    "services/modeling": (4_636, 116),
    "services/monitor": (989, 33),
    "services/process": (1_803, 56),
    "services/scorer": (398, 7),
    "services/tinker": (2_296, 46),
    "services/trainer": (5_429, 127),
    "services/weight_hub": (1_752, 17),
    "services/weights": (5_014, 91),
    "deploy": (6_124, 160),
    "src": (919, 9),
    "benchmarks": (5_500, 170),
    "tests": (42_000, 2_175),
}


@dataclass
class Folder:
    """Totals of the files of a folder."""

    files: int = 0
    lines: int = 0
    names: int = 0


def folder_of(path: str) -> str:
    """Return the row that a file counts in: one for each service, else the top folder."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "services" and len(parts) > 2 else parts[0]


def public_names(text: str) -> int:
    """Count the functions and classes of a module that others may use."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return sum(
        isinstance(node, kinds) and not node.name.startswith("_") for node in ast.parse(text).body
    )


def count(root: Path) -> tuple[dict[str, Folder], list[str]]:
    """Count the Python files of the repository at `root`; return also those that are too long."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    folders: dict[str, Folder] = {}
    long: list[str] = []
    for name in sorted(filter(None, listing.stdout.split("\0"))):
        path = root / name
        if not path.is_file():
            continue  # removed, and not committed yet
        text = path.read_text(encoding="utf-8")
        folder = folders.setdefault(folder_of(name), Folder())
        lines = len(text.splitlines())
        folder.files += 1
        folder.lines += lines
        folder.names += public_names(text)
        if lines > FILE_LINES:
            long.append(f"{name}: {lines} lines, the limit is {FILE_LINES}")
    return folders, long


def main(root: Path = ROOT, budgets: Mapping[str, tuple[int, int]] = BUDGETS) -> int:
    """Print the table and each exceeded budget; return 1 if there is one."""
    folders, faults = count(root)
    print(f"{'folder':26}{'files':>6}{'lines':>8}{'budget':>8}{'names':>7}{'budget':>8}")
    for name, (lines, names) in budgets.items():
        found = folders.get(name)
        if found is None:
            faults.append(f"{name}: no such folder: remove its budget")
            continue
        print(f"{name:26}{found.files:6}{found.lines:8,}{lines:8,}{found.names:7,}{names:8,}")
        for what, is_now, most in (("lines", found.lines, lines), ("names", found.names, names)):
            if is_now > most:
                faults.append(f"{name}: {is_now:,} {what}, the budget is {most:,}")
    for name in folders.keys() - budgets.keys():
        if name.split("/")[0] in PRODUCTION:
            faults.append(f"{name}: has no budget: add one to {Path(__file__).name}")
    made = [one for name, one in folders.items() if name.split("/")[0] in PRODUCTION]
    print(f"{'production':26}{sum(f.files for f in made):6}{sum(f.lines for f in made):8,}")
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
