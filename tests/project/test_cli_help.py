"""Conveniences of the command line: completion, near names, precedence."""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from umbra import cli


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
        (["zzzz"], "No such command 'zzzz'."),
        (["train", "run.toml"], "No such command 'train'. It is `umbra up RUN_FILE` here."),
        (["simulate"], "It is `umbra check RUN_FILE` here."),
        (["up", "run.toml", "--gpus", "2"], "Set trainer.ranks and generator.count in the"),
        (
            ["up", "run.toml", "--max-tokens=9"],
            "or sampling.max_tokens in the run file, or by",
        ),
        (["check", "--gpus", "h100"], "Did you mean '--gpu'?"),
        (["trainer", "--learnig-rate", "1"], "No such option"),
        (["buffer", "--set", "buffer.group_siez=3"], "did you mean buffer.group_size?"),
    ],
)
def test_a_wrong_name_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "is under way: name a run's folder, or its buffer by --broker tcp://host:port"),
        (["nothing"], "nothing is no run: neither it nor runs/nothing is a folder"),
        (["nothing", "--broker", "tcp://h:1"], "RUN nothing and --broker tcp://h:1 both name"),
        (["--hub", "nowhere"], "--hub nowhere: write it as tcp://host:port"),
        (["--hub", "tcp://h:1", "--member", "trainer"], "are different checks: give one"),
    ],
)
def test_a_ping_to_nobody(
    words: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("UMBRA_BROKER", raising=False)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["status", *words]) == 2
    assert told in capsys.readouterr().err


def test_there_are_few_commands() -> None:
    assert len(cli.COMMANDS) <= 27, sorted(cli.COMMANDS)
