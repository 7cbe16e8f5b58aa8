"""Count the lines of production Python by folder, in one or several git revisions.

    python .ci/line_counts.py --rev 877d910 --rev HEAD

Every line counts: code, docstrings, comments and blank lines. Tests, benchmarks, tools and
examples are no production code. --json prints {revision: {folder: {"files": n, "lines": n}}}.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCTION = ("deploy", "proto", "services", "src")

Folders = dict[str, dict[str, int]]


def folder_of(path: str) -> str:
    """Return the row that `path` is counted in: one for each service, else the top folder."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "services" and len(parts) > 2 else parts[0]


def count(repository: Path, revision: str) -> Folders:
    """Count the production files of `revision` and their lines.

    Raises:
        ValueError: the repository has no such revision.
    """
    done = subprocess.run(
        ["git", "archive", "--format=tar", revision], cwd=repository, capture_output=True
    )
    if done.returncode != 0:
        raise ValueError(f"{revision}: {done.stderr.decode().strip()}")
    files: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            # src/umbra links to the other folders: a link is no file, so nothing counts twice.
            if not member.isfile() or not member.name.endswith(".py"):
                continue
            content = archive.extractfile(member)
            if content is not None and member.name.split("/")[0] in PRODUCTION:
                files[folder_of(member.name)] += 1
                lines[folder_of(member.name)] += len(content.read().splitlines())
    return {name: {"files": files[name], "lines": lines[name]} for name in sorted(files)}


def table(counted: Mapping[str, Folders]) -> str:
    """Format the counts as a Markdown table, a revision a column, with the sum as last row."""
    names = sorted({name for folders in counted.values() for name in folders})
    rows = [["folder", *counted], ["---", *("---:" for _ in counted)]]
    rows += [[f"`{n}`", *(f"{_lines(f, n):,}" for f in counted.values())] for n in names]
    sums = (sum(_lines(f, name) for name in names) for f in counted.values())
    rows.append(["**all**", *(f"**{total:,}**" for total in sums)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _lines(folders: Folders, name: str) -> int:
    return folders[name]["lines"] if name in folders else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts; return 2 for a revision that does not exist."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rev", action="append", help="git revision, HEAD unless given")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    try:
        counted = {revision: count(ROOT, revision) for revision in options.rev or ["HEAD"]}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(counted, indent=2) if options.json else table(counted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
