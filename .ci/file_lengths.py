"""Name the Python files of more than 400 lines, as advice; fail for one of more than 600."""

import subprocess
import sys
from pathlib import Path

ADVICE_LINES = 400  # where one looks again whether the file holds one idea
LIMIT_LINES = 600
ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Print each file that is long; return 1 if one is beyond the limit, else 0."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    lengths = {path: len(path.read_bytes().splitlines()) for path in paths if path.is_file()}
    for path, length in sorted(lengths.items(), key=lambda item: -item[1]):
        if length > LIMIT_LINES:
            print(f"{path.relative_to(ROOT)}: {length} lines, the limit is {LIMIT_LINES}")
        elif length > ADVICE_LINES:
            print(f"{path.relative_to(ROOT)}: {length} lines: does it still hold one idea?")
    longest = max(lengths.values(), default=0)
    print(f"{len(lengths)} files, the longest has {longest} lines")
    return 1 if longest > LIMIT_LINES else 0


if __name__ == "__main__":
    sys.exit(main())
