"""Facts for a person; commands and paths to copy, also without an activated environment."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click

from umbra.services.config import RunSection

COLUMNS = 80  # that a terminal has at least


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


def command_line(command: str, run: Path, *more: str) -> str:
    """A command on the run in folder `run`, as it can be copied: by its id if that fits better."""
    line = f"{shown_command()} {shlex.join((command, shown_path(run), *more))}"
    if len(line) <= COLUMNS - 4 or run.parent != Path(RunSection().dir).resolve():
        return line
    return f"{shown_command()} {shlex.join((command, run.name, *more))}"


def print_facts(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values: in two columns on a terminal, where values wrap between words.

    What has no space is never broken: a path or an address can be copied as it stands.
    """
    if not sys.stdout.isatty():
        for name, value in rows:
            click.echo(f"{name}: {value}")
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        first, *more = wrapped(value, shutil.get_terminal_size().columns - width - 3) or [""]
        click.echo(click.style(name.ljust(width), bold=True) + f"  {first}")
        for line in more:
            click.echo(" " * (width + 2) + line)


def wrapped(text: str, columns: int) -> list[str]:
    """`text` in lines of so many characters, unless a word has more."""
    return textwrap.wrap(text, max(20, columns), break_long_words=False, break_on_hyphens=False)
