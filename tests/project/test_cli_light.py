"""The command line stays light, and its exit codes and messages are the promised ones."""

import re
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from fakes.commands import call

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


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    return call([sys.executable, *args])


def install_command(
    monkeypatch: pytest.MonkeyPatch, callback: Callable[[], object], name: str = "probe"
) -> None:
    """Add a sub-command `name` that runs `callback`."""
    module = types.ModuleType("umbra_probe_command")
    module.command = click.Command(name, callback=callback)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = cli.SubCommand(f"{module.__name__}:command", "A probe.")
    monkeypatch.setitem(cli.COMMANDS, name, entry)


def test_help_imports_nothing_heavy() -> None:
    result = run_python("-c", HELP_THEN_MODULES)
    assert result.returncode == 0, result.stderr
    help_text, _, modules_text = result.stdout.partition("MODULES ")
    modules = set(modules_text.split())
    assert "umbra.cli" in modules
    assert modules.isdisjoint(HEAVY)
    assert not [name for name in modules if name.startswith(("umbra.services", "umbra.deploy"))]
    for name, entry in cli.COMMANDS.items():
        assert name in help_text
        assert entry.help.split()[0] in help_text


def test_python_dash_m_prints_the_version() -> None:
    result = run_python("-m", "umbra", "--version")
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


def raising(error: BaseException) -> Callable[[], object]:
    def callback() -> None:
        raise error

    return callback


@pytest.mark.parametrize(
    ("callback", "code", "told"),
    [
        (raising(StartupError("port 5555 is taken")), 3, "umbra: error: port 5555 is taken\n"),
        (raising(KeyboardInterrupt()), 130, "umbra: interrupted\n"),
        (raising(ModuleNotFoundError("No module", name="cupy.cuda")), 2, "umbra-rl[nccl]"),
        (lambda: 5, 5, ""),
        (lambda: "not a code", 0, ""),
    ],
)
def test_exit_codes_and_what_is_said(
    callback: Callable[[], object],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install_command(monkeypatch, callback)
    assert cli.main(["probe"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert told in captured.err and "\n" not in captured.err.strip(), "one line"


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, raising(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["probe"])
