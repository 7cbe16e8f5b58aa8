"""Output of a run: how often a line is said; and where nobody reads it or the disk is full."""

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


def run(program: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    return run_shell('exec "$0" "$@"', sys.executable, *program, stdout=stdout)


def run_shell(
    script: str, *words: str, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", script, *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=limit(60),
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def closed_pipe() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("where", [closed_pipe, full_disk])
def test_a_run_goes_on(where: Callable[[], int]) -> None:
    done = run(["-c", ON], where())
    assert (done.returncode, done.stderr) == (0, "went on\n")


def test_a_command_that_only_prints_ends_without_a_traceback(tmp_path: Path) -> None:
    for index in range(3):
        folder = tmp_path / "runs" / f"run-{index}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    done = run(["-m", "umbra", "runs", str(tmp_path / "runs")], closed_pipe())
    assert (done.returncode, done.stderr) == (1, "")
    done = run(["-m", "umbra", "runs", str(tmp_path / "runs")], full_disk())
    assert done.returncode == 6 and done.stderr.startswith("umbra: error: no space is left")


def test_streams_that_are_closed_from_the_start() -> None:
    """As by some schedulers; else the first file that is opened would be written to."""
    done = run_shell('exec "$0" -m umbra up nowhere.toml <&- >&-', sys.executable)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "umbra: error: run file nowhere.toml does not exist\n"
