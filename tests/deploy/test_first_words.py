"""What a first run says: what goes on meanwhile, what its figures mean, and what to type next."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes.looks import member, status

from umbra.deploy.files.run_folder import RunFolder
from umbra.deploy.run.live import PlainView, Progress, View
from umbra.proto.records import Ledger


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
