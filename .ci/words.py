"""Print each banned phrase in Python, Markdown and other texts; fail if there is one.

The field has a word for each: heartbeat, recent, resume, again, connection, middleware. Comments,
strings and names count, also where a phrase goes over two lines. Docstrings, of attributes too,
begin with a noun or a verb. Left out: questions ("What is 2 + 2?") and the changelog's old names.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = ("*.py", "*.md", "*.toml", "*.sh", "*.js", "*.html", "*.yaml", "*.yml", "*.ipynb")
PHRASES = (
    *("anew", "by then", "gone on", "of late", "that which", "those of", "what there is"),
    *("door", "doors", "errand", "foreman", "level group", "outlet", "pulse", "staffing"),
    *("dialect", "stranger", "strangers"),
)
OPENINGS = re.compile(r"\s*(What|Whatever|Whether|Whoever) ")
GAP = r"(?:[\s#]+|\s*\"\s+f?\"\s*)"  # also between lines of a comment, and pieces of a string
_ALL = "|".join(map(re.escape, PHRASES)).replace(r"\ ", GAP)
BANNED = re.compile(rf"\b(?:{_ALL}|what{GAP}is\b(?! [\d{{\"]))\b", re.IGNORECASE)


def hits(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and phrase of each hit in the text of a file."""
    for found in BANNED.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, " ".join(found.group().split())
    for node in ast.walk(ast.parse(text)) if path.endswith(".py") else ():
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if found := OPENINGS.match(str(node.value.value)):
                yield node.lineno, f'docstring that begins with "{found[1]}"'


def main(root: Path = ROOT) -> int:
    """Print file, line and phrase of each hit; return 1 if there is one."""
    command = ["git", "ls-files", "-z", "--", *FILES]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    paths = {root / name for name in listing.split("\0") if name}
    paths -= {Path(__file__).resolve(), root / "CHANGELOG.md"}
    faults = [
        f"{path.relative_to(root)}:{line}: {phrase}"
        for path in sorted(path for path in paths if path.is_file())
        for line, phrase in sorted(hits(path.name, path.read_text(encoding="utf-8")))
    ]
    print("\n".join(faults) or "no banned phrases")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
