"""The command line stays light, and its exit codes and messages are the promised ones."""

import subprocess
import sys
import types
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
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    for name in umbra.__all__:
        assert hasattr(umbra, name)
        assert name == "__version__" or f"umbra.{name}" in page, f"docs/data.md lacks {name}"
    with pytest.raises(AttributeError, match="has no attribute 'trains'"):
        _ = umbra.trains  # pyright: ignore[reportAttributeAccessIssue]


def test_umbra_error_is_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise StartupError("port 5555 is taken: choose another")

    install_command(monkeypatch, fail)
    assert cli.main(["probe"]) == StartupError.exit_code == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "umbra: error: port 5555 is taken: choose another\n"


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    install_command(monkeypatch, interrupt)
    assert cli.main(["probe"]) == 130


def test_an_int_that_a_command_returns_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    install_command(monkeypatch, lambda: 5)
    assert cli.main(["probe"]) == 5
    install_command(monkeypatch, lambda: "not a code")
    assert cli.main(["probe"]) == 0


def test_a_missing_optional_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def need_cupy() -> None:
        raise ModuleNotFoundError("No module named 'cupy'", name="cupy.cuda")

    install_command(monkeypatch, need_cupy)
    assert cli.main(["probe"]) == 2
    assert "umbra-rl[nccl]" in capsys.readouterr().err


def test_an_unforeseen_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down() -> None:
        raise ZeroDivisionError("a bug")

    install_command(monkeypatch, break_down)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["probe"])
