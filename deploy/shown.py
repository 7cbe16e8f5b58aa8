"""Facts for a person; commands and paths to copy, also without an activated environment."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO, cast

import click


def shown_path(path: Path) -> str:
    """Return `path` from the current folder, if it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@contextmanager
def best_effort_output() -> Iterator[None]:
    """Continue when standard output is closed or its disk is full: a run is worth more."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _BestEffort(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


class _BestEffort:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stream, name)
        return partial(self._attempt, method) if name in ("write", "flush") else method

    def _attempt(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # with what Python has not written yet
            os.close(nowhere)


def shown_command() -> str:
    script = Path(sys.executable).parent / "umbra"
    on_path = shutil.which("umbra")
    if on_path is not None and Path(on_path).absolute() == script.absolute():
        return "umbra"
    if os.access(script, os.X_OK):
        return shown_path(script.absolute())
    return f"{shown_path(Path(sys.executable))} -m umbra"


def command_line(command: str, run: Path, *arguments: str) -> str:
    """Return a command on the run in folder `run` to copy."""
    return f"{shown_command()} {shlex.join((command, shown_path(run), *arguments))}"


def print_facts(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and values: in two columns on a terminal, where values wrap between words.

    What has no space is never broken: a path or an address can be copied as it stands.
    """
    if not sys.stdout.isatty():
        for name, value in rows:
            click.echo(f"{name}: {value}")
        return
    width = max(len(name) for name, _ in rows)
    columns = max(20, shutil.get_terminal_size().columns - width - 3)
    for name, value in rows:
        first, *following = textwrap.wrap(
            value, columns, break_long_words=False, break_on_hyphens=False
        ) or [""]
        click.echo(click.style(name.ljust(width), bold=True) + f"  {first}")
        for line in following:
            click.echo(" " * (width + 2) + line)
