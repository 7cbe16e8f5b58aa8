"""What a first run says: what goes on meanwhile, what its figures mean, and what to type next."""

import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.looks import member, status
from rich.console import Console

from umbra.deploy.commands.demo import closing_words
from umbra.deploy.files import shown
from umbra.deploy.files.run_folder import RunFolder
from umbra.deploy.files.shown import COLUMNS, command_line, print_facts
from umbra.deploy.prepare.stage import run_stage
from umbra.deploy.run import live
from umbra.deploy.run.live import PlainView, Progress, TerminalView, View
from umbra.proto.records import Ledger
from umbra.services.process.child import child_environ

RUN_ID = "demo-sort-20261123-065808-963a"


def test_figures_and_commands_fit_into_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shown, "shown_command", lambda: "/some/where/.venv/bin/umbra")
    lines = list(closing_words(tmp_path / "runs" / RUN_ID))
    assert max(len(line) for text in lines for line in text.split("\n")) <= COLUMNS
    text = "\n".join(lines)
    for command in (f"runs runs/{RUN_ID} --worst", "init my-run"):
        assert f"umbra {command}\n" in text, command


def test_a_command_names_the_run_so_that_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shown, "shown_command", lambda: "umbra")
    assert command_line("report", tmp_path / "runs" / "a") == "umbra report runs/a"
    assert command_line("report", tmp_path / "my runs" / "a") == "umbra report 'my runs/a'"
    elsewhere = Path("/elsewhere") / ("x" * COLUMNS)
    assert command_line("report", elsewhere) == f"umbra report {elsewhere}"  # no id would find it
    long = "y" * COLUMNS
    assert command_line("report", tmp_path / "runs" / long) == f"umbra report {long}"


def test_the_outcome_wraps_between_words_and_keeps_paths_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = "/a/path/" + "which-is-long-" * 6
    rows = [("pushes", "word " * 30), ("model", path), ("none", "")]
    print_facts(rows)
    assert capsys.readouterr().out.splitlines()[1] == f"model: {path}"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    print_facts(rows)
    lines = capsys.readouterr().out.splitlines()
    assert f"  {path}" in lines[-2]
    assert max(len(line) for line in lines[:-2]) <= 80 + len("\x1b[1m\x1b[0m")
    assert lines[1].startswith(" " * 8 + "word")


def progress_of(folder: Path, **changes: Any) -> Progress:
    progress = Progress(RunFolder(folder))
    progress.status = status(**changes)
    return progress


def test_lines_say_what_goes_on_once_and_details_now_and_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    view = PlainView(every_s=5.0, clock=lambda: now[0])

    def said(*calls: Sequence[str]) -> list[str]:
        for call in calls:
            view.doing(*call)
        return capsys.readouterr().out.splitlines()

    assert said(["warm start"], ["warm start", "step 1/9"]) == ["warm start ..."]
    now[0] = 5.0
    assert said(["warm start", "step 4/9"], ["warm start", "step 5/9"]) == ["  step 4/9"]
    now[0] = 10.0
    assert said(["warm start", "step 4/9"]) == []
    assert said(["starting"], ["starting"]) == ["starting ..."]
    View().doing("anything")
    assert capsys.readouterr().out == ""


def test_a_run_that_has_issued_nothing_says_who_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    view = PlainView(every_s=5.0, clock=lambda: now[0])
    members = [member("trainer", state="starting", activity="loading the model")]
    progress = progress_of(tmp_path, version=0, ledger=Ledger(), members=members, warnings=[])
    now[0] = 5.0
    view.update(progress, {})
    assert capsys.readouterr().out == "starting: trainer loading the model\n"
    progress.status = status(version=0, ledger=Ledger(), members=[], warnings=[])
    now[0] = 10.0
    view.update(progress, {})
    assert capsys.readouterr().out == "starting: no process has joined yet\n"


def test_the_last_line_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    view = PlainView(every_s=5.0, clock=lambda: now[0])
    progress = progress_of(tmp_path, version=300, warnings=[])
    for now[0] in (1.0, 5.0, 10.0):
        view.update(progress, {})
    assert capsys.readouterr().out.count("step 300/300") == 1


def test_on_a_terminal_a_line_counts_the_seconds_and_commands_are_not_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(live, "Console", lambda: Console(file=out, width=80, force_terminal=True))
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    view = TerminalView()
    view.doing("warm start")
    now[0] = 7.0
    view.doing("warm start", "step 3/9")
    assert "warm start  step 3/9  7 s" in out.getvalue()
    command = "  " + "/some/where/" * 8 + "umbra monitor"
    view.say(command)
    assert command in out.getvalue()
    now[0] = 8.0
    view.doing("starting")
    now[0] = 9.0
    view.update(progress_of(tmp_path), {})
    assert "run-1" in out.getvalue()
    view.say("done")
    view.close()
    assert "done" in out.getvalue()


def test_a_stage_is_told_of_while_it_runs(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    told: list[None] = []
    run_stage(
        "version",
        ("--version",),
        folder=folder,
        environ=child_environ(),
        waiting=lambda: told.append(None),
    )
    assert told
