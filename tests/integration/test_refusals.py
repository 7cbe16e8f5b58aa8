"""Impossible runs are refused before anything starts, in one sentence that names the culprit."""

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from fakes.commands import UMBRA, call

from umbra.deploy.prepare.preflight import load_given
from umbra.deploy.run_folder import RunFolder
from umbra.services.config.loader import to_json


@pytest.fixture
def folder(project: Path) -> Path:
    """The folder of a run that can go on."""
    path = project / "runs" / "run-1"
    path.mkdir(parents=True)
    (path / "config.json").write_bytes(to_json(load_given(project / "run.toml", ())[0]))
    return path


def umbra(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call([*UMBRA, *arguments], cwd=cwd)


def test_a_run_that_may_not_go_on_is_left_as_it_was(project: Path, folder: Path) -> None:
    """Its address is in use: refused at once, and every file is as it was."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        config = load_given(project / "run.toml", (f"run.broker={address}",))[0]
        (folder / "config.json").write_bytes(to_json(config))
        before = {"ledger": {"issued": 8, "trained": 8, "ended": {}, "in_flight": {}}}
        (folder / "buffer.json").write_text(json.dumps({**before, "ending": "drained"}))
        (folder / "summary.json").write_text(json.dumps({**before, "exit_code": 143}))
        files = contents(folder)
        done = umbra(project, "up", str(folder), "--json")
    assert done.returncode == 3, done
    assert f"{address} is in use by another process" in done.stderr
    assert contents(folder) == files


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run, but for its lock and its logs."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if path.name != "lock" and path.parent.name != "logs"
    }


def test_settings_with_which_a_run_cannot_go_on_are_not_kept(project: Path, folder: Path) -> None:
    files = contents(folder)
    for setting, said in (
        ("environment.reward=tiny_reward:raises", "no such thing"),
        ("buffer.group_sze=3", "did you mean buffer.group_size"),
        ("model.path=nowhere", "nowhere"),
    ):
        done = umbra(project, "up", str(folder), "--set", setting)
        assert done.returncode == 2, done
        assert said in done.stderr
        assert contents(folder) == files


def test_a_second_up_on_a_folder_is_refused_and_told_who_has_it(
    project: Path, folder: Path
) -> None:
    with RunFolder.existing(folder).held():
        files = contents(folder)
        done = umbra(project, "up", str(folder), "--set", "model.path=nowhere")
    assert done.returncode == 2, done
    said = f"the run in {folder} is under way, started by process {os.getpid()}: watch it"
    assert said in done.stderr
    assert contents(folder) == files
    with RunFolder.existing(folder).held():
        pass  # whoever had it is gone


def test_nobody_answers(tmp_path: Path) -> None:
    done = umbra(tmp_path, "status", "--broker", "tcp://127.0.0.1:9")
    assert done.returncode == 5
    said = "umbra: error: no buffer answers at tcp://127.0.0.1:9 within 5 s: check --broker, "
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_what_is_shown_is_a_run_file(project: Path) -> None:
    first = umbra(
        project, "check", "run.toml", "--show", "--set", 'environment.options.text="a\\n\'é😀"'
    ).stdout
    (project / "shown.toml").write_text(first, encoding="utf-8")
    second = umbra(project, "check", "shown.toml", "--show").stdout
    assert second == first
    assert "😀" in first
