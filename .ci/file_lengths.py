"""Fail if a Python file has more than 400 lines: such a file wants to be two."""

import subprocess
import sys
from pathlib import Path

LIMIT_LINES = 400
ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Print each file that is too long; return 1 if there is one, else 0."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    lengths = {path: len(path.read_bytes().splitlines()) for path in paths if path.is_file()}
    too_long = {path: length for path, length in lengths.items() if length > LIMIT_LINES}
    for path, length in too_long.items():
        print(f"{path.relative_to(ROOT)}: {length} lines, the limit is {LIMIT_LINES}")
    if not too_long:
        print(f"{len(lengths)} files, the longest has {max(lengths.values(), default=0)} lines")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
