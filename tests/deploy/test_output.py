"""Output of commands whose streams nobody reads, or that are closed, or on a full disk."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.slowness import limit

ON = """
import click
from umbra.deploy.shown import best_effort_output
from rich.console import Console
with best_effort_output():
    for number in range(20_000):
        click.echo(f"line {number}")
    Console().print("more")
    click.echo("went on", err=True)
"""


def run(stdout: int, *words: str, script: str = 'exec "$0" "$@"') -> tuple[int, str]:
    """Run Python with these words; return the exit code and what it says."""
    done = subprocess.run(
        ["sh", "-c", script, sys.executable, *words],
        stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=limit(60), check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    return done.returncode, done.stderr


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("where", [closed_pipe, full_disk])
def test_a_run_goes_on(where: Callable[[], int]) -> None:
    assert run(where(), "-c", ON) == (0, "went on\n")


def test_other_commands_end_without_a_traceback(tmp_path: Path) -> None:
    folder = tmp_path / "run-1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert run(closed_pipe(), "-m", "umbra", "runs", str(tmp_path)) == (1, "")
    code, said = run(full_disk(), "-m", "umbra", "runs", str(tmp_path))
    assert code == 6 and said.startswith("umbra: error: no space is left")
    # As by some schedulers; else the first file that is opened would be written to.
    closed = run(subprocess.PIPE, "up", "nowhere.toml", script='exec "$0" -m umbra "$@" <&- >&-')
    assert closed == (2, "umbra: error: run file nowhere.toml does not exist\n")
