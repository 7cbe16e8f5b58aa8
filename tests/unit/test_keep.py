"""`umbra keep`: what it runs again, when it gives up, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from fakes.slowness import seconds

from umbra import cli
from umbra.deploy.keep_command import keep
from umbra.proto.errors import UsageError
from umbra.services.process.signals import SignalCounter
from umbra.services.process.supervisor import FINAL_CODES, RestartPolicy


@pytest.fixture
def signals() -> Iterator[SignalCounter]:
    with SignalCounter() as counter:
        yield counter


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def at_once(limit: int = 20) -> RestartPolicy:
    """A policy without pauses."""
    return RestartPolicy(first_s=0, limit=limit)


def test_it_runs_again_until_it_succeeds(
    tmp_path: Path, signals: SignalCounter, capfd: pytest.CaptureFixture[str]
) -> None:
    script = f"echo run >> {tmp_path}/runs; [ $(wc -l < {tmp_path}/runs) -gt 2 ] || exit 5"
    assert keep(shell(script), "buffer", at_once(), signals) == 0
    assert len((tmp_path / "runs").read_text(encoding="utf-8").splitlines()) == 3
    assert capfd.readouterr().err == "buffer ended (exit code 5): restart in 0 s\n" * 2


@pytest.mark.parametrize("code", FINAL_CODES)
def test_what_would_happen_again_is_not_tried_again(
    tmp_path: Path, signals: SignalCounter, code: int
) -> None:
    assert keep(shell(f"echo run >> {tmp_path}/runs; exit {code}"), "x", at_once(), signals) == code
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "run\n"


@pytest.mark.parametrize(("script", "code"), [("exit 5", 5), ("kill -9 $$", 5), ("exit 1", 6)])
def test_it_gives_up(
    signals: SignalCounter, capfd: pytest.CaptureFixture[str], script: str, code: int
) -> None:
    assert keep(shell(script), "x", at_once(limit=2), signals) == code
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 3
    assert said[-1].endswith("and is not restarted")


def test_a_signal_in_a_pause_ends_it(signals: SignalCounter) -> None:
    """The command kills its parent, which is this test."""
    script = "kill -TERM $PPID; exit 5"
    policy = RestartPolicy(first_s=10**6)
    assert keep(shell(script), "x", policy, signals) == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_told_by_the_exit_code(number: signal.Signals) -> None:
    """So a launcher can tell who was asked to go from who is done: after a reboot it starts it."""
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo drained; exit 0' {name}; echo up; while :; do sleep 0.05; done"
    code = "import sys; from umbra.cli import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", code, "keep", "--restarts", "3", "--", *shell(script)],
        stdout=subprocess.PIPE,
        text=True,
    ) as kept:
        assert kept.stdout is not None
        assert kept.stdout.readline() == "up\n"
        kept.send_signal(number)
        assert kept.stdout.readline() == "drained\n"
        assert kept.wait(seconds(30)) == 128 + number


def test_the_command_is_nobody_s_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signals: SignalCounter
) -> None:
    """Its parent is perhaps srun on another machine: it must not watch for ours."""
    monkeypatch.setenv("UMBRA_PARENT_PID", str(os.getppid()))
    assert keep(shell(f"env > {tmp_path}/env"), "x", at_once(), signals) == 0
    assert "UMBRA_PARENT_PID" not in (tmp_path / "env").read_text(encoding="utf-8")


def test_a_program_that_is_not_there(signals: SignalCounter) -> None:
    with pytest.raises(UsageError, match="no-such-program cannot be started: No such file"):
        keep(["no-such-program"], "x", at_once(), signals)


def test_flags_behind_the_command_are_the_command_s() -> None:
    assert cli.main(["keep", "--restarts", "0", "--", "sh", "-c", 'exit "$1"', "sh", "7"]) == 7
    assert cli.main(["keep", "sh", "-c", "exit 4", "--restarts"]) == 4
    context = click.Context(cli.cli)
    assert cli.cli.get_command(context, "keep") is not None
