"""Print each banned phrase in Python and Markdown files; fail if there is one.

The field has a word for each: heartbeat, recent, resume, again. Comments, strings and names count,
also where a phrase goes over two lines. Docstrings begin with a noun or a verb.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHRASES = ("anew", "of late", "gone on with", "by then", "foreman", "errand", "pulse")
OPENINGS = re.compile(r"\s*(What|Whether|Whoever) ")
GAP = r"(?:[\s#]+|\s*\"\s+f?\"\s*)"  # also between lines of a comment, and pieces of a string
BANNED = re.compile(rf"\b({'|'.join(PHRASES)})\b".replace(" ", GAP), re.IGNORECASE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def hits(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield line and phrase of each hit in the text of a file."""
    for found in BANNED.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, " ".join(found.group().split())
    for node in ast.walk(ast.parse(text)) if path.endswith(".py") else ():
        if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)):
            if found := OPENINGS.match(doc):
                yield node.body[0].lineno, f'docstring that begins with "{found[1]}"'


def main(root: Path = ROOT) -> int:
    """Print file, line and phrase of each hit; return 1 if there is one."""
    command = ["git", "ls-files", "-z", "--", "*.py", "*.md"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    paths = {root / name for name in listing.split("\0") if name} - {Path(__file__).resolve()}
    faults = [
        f"{path.relative_to(root)}:{line}: {phrase}"
        for path in sorted(path for path in paths if path.is_file())
        for line, phrase in sorted(hits(path.name, path.read_text(encoding="utf-8")))
    ]
    print("\n".join(faults) or "no banned phrases")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
