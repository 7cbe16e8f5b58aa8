"""Commands and paths as a person can copy them, also without an activated environment."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def shown_path(path: Path) -> str:
    """`path` from the current folder, if it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def shown_command() -> str:
    """How this installation's `umbra` is called here."""
    own = Path(sys.executable).parent / "umbra"
    found = shutil.which("umbra")
    if found is not None and Path(found).absolute() == own.absolute():
        return "umbra"
    if os.access(own, os.X_OK):
        return shown_path(own.absolute())
    return f"{shown_path(Path(sys.executable))} -m umbra"
