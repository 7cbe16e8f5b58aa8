"""The command line: light, documented, with near names and the promised exit codes and output."""

import os
import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from fakes.commands import call
from fakes.slowness import limit

import umbra
from umbra import cli
from umbra.proto.errors import StartupError

HEAVY = (
    "torch", "transformers", "accelerate", "numpy", "zmq", "msgpack", "msgspec", "rich", "yaml",
    "tomli_w",
)  # fmt: skip

HELP_THEN_MODULES = """
import sys
from umbra.cli import main
code = main(["--help"])
print("MODULES", *sorted(sys.modules))
sys.exit(code)
"""


def install_command(monkeypatch: pytest.MonkeyPatch, outcome: object) -> None:
    """Add a sub-command "probe" that raises `outcome`, if it is an error, or else returns it."""

    def callback() -> object:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = types.ModuleType("umbra_probe_command")
    module.command = click.Command("probe", callback=callback)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = cli.SubCommand(f"{module.__name__}:command", "A probe.")
    monkeypatch.setitem(cli.COMMANDS, "probe", entry)


def test_help_imports_nothing_heavy_and_shows_few_commands() -> None:
    result = call([sys.executable, "-c", HELP_THEN_MODULES])
    assert result.returncode == 0, result.stderr
    help_text, _, modules_text = result.stdout.partition("MODULES ")
    modules = set(modules_text.split())
    assert "umbra.cli" in modules
    assert modules.isdisjoint(HEAVY)
    assert not [name for name in modules if name.startswith(("umbra.services", "umbra.deploy"))]
    for name, entry in cli.COMMANDS.items():
        assert name in help_text
        assert entry.help.split()[0] in help_text
    assert len(cli.COMMANDS) <= 27, sorted(cli.COMMANDS)
    result = call([sys.executable, "-m", "umbra", "--version"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"umbra {umbra.__version__} (Python 3.")


def test_public_names() -> None:
    """Each is there, and marked stable or provisional once."""
    page = (Path(__file__).parents[2] / "docs" / "start.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`umbra\..*`) \| (?:stable|provisional)\b", page, re.MULTILINE)
    marked = Counter(re.findall(r"`umbra\.(\w+(?:\.trl\.\w+)?)`", " ".join(rows)))
    assert marked == Counter([*umbra.__all__, "compat.trl.GRPOTrainer"])
    assert all(hasattr(umbra, name) for name in umbra.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'trains'"):
        _ = umbra.trains  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("outcome", "code", "told"),
    [
        (StartupError("port 5555 is taken"), 3, "umbra: error: port 5555 is taken\n"),
        (KeyboardInterrupt(), 130, "umbra: interrupted\n"),
        (ModuleNotFoundError("No module", name="cupy.cuda"), 2, "umbra-rl[nccl]"),
        (OSError(13, "Permission denied", "out"), 2, "umbra: error: out: Permission denied: name"),
        (5, 5, ""),
    ],
)
def test_exit_codes_and_what_is_said(
    outcome: object,
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install_command(monkeypatch, outcome)
    assert cli.main(["probe"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err and "\n" not in captured.err.strip(), "one line"
    for bug in (ZeroDivisionError("a bug"), OSError(5, "Input/output error", "a bug")):
        install_command(monkeypatch, bug)
        with pytest.raises(type(bug), match="a bug"):  # its traceback stays
            cli.main(["probe"])


def every_command(
    group: click.Group = cli.cli, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """All commands that there are, groups included, by what one types."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))


def test_every_command_and_flag_is_documented_with_its_default() -> None:
    told: set[str] = set()
    for name, command in every_command():
        assert command.help, name
        told.add(name)
        context = click.Context(command, **command.context_settings)
        for option in (p for p in command.params if isinstance(p, click.Option)):
            record = option.get_help_record(context)
            assert record is not None, f"{name} hides {option.name}"
            assert option.help, f"{name} {option.name} has no help"
            default = option.get_default(context)
            if isinstance(default, str | float | int) and default != "" and not option.is_flag:
                assert f"default: {default}" in record[1], f"{name} {option.name}: {default!r}"
    assert {"buffer", "weight-hub"} <= told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bufer"], "No such command 'bufer'. Did you mean 'buffer'?"),
        (["train", "run.toml"], "No such command 'train'. It is `umbra up RUN_FILE` here."),
        (["up", "run.toml", "--gpus", "2"], "Set trainer.ranks and generator.count in the"),
        (
            ["status"],
            "is under way: name a run's folder, or its buffer by --broker tcp://host:port",
        ),
        (["status", "nothing"], "nothing is no run: neither it nor runs/nothing is a folder"),
        (["status", "nothing", "--broker", "tcp://h:1"], "RUN nothing and --broker tcp://h:1 both"),
        (["status", "--broker", "nowhere"], "--broker nowhere: write it as tcp://host:port"),
        (["status", "--broker", "tcp://h:1", "--ping", "--member", "trainer"], "give one"),
        (["status", "--broker", "tcp://h:1", "--ping", "--json"], "different answers: give one"),
    ],
)
def test_a_name_of_nothing_is_refused(
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("UMBRA_BROKER", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


# -- streams that nobody reads, that are closed, or of a full disk ---------------------------------

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
