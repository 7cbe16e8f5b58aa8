"""Command lines that run a module of Umbra in another Python environment (`run_module.py`)."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from umbra.proto.errors import UsageError
from umbra.services.environments.run_module import command_line
from umbra.services.process.child import child_environ


def apart(python: str, module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """The command line, and its environment, as if that of `python` were activated.

    Args:
        python: the program; empty = ours.
        module: its function `main` is called with the arguments. It needs the standard library
            and msgpack only.
        arguments: texts.

    Raises:
        UsageError: there is no such program.
    """
    environ = child_environ()
    found = shutil.which(python or sys.executable)
    if found is None:
        raise UsageError(f"environment.python = {python} is no program that can be run")
    if python:
        folder = Path(found).absolute().parent
        environ.pop("PYTHONHOME", None)
        environ["PATH"] = f"{folder}{os.pathsep}{environ.get('PATH', os.defpath)}"
        if (folder.parent / "pyvenv.cfg").is_file():
            environ["VIRTUAL_ENV"] = str(folder.parent)
    return command_line(found, module, *arguments), environ
