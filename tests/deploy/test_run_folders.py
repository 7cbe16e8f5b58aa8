"""Folders of runs: which run is meant, what `umbra runs` tells, effects of a file that is lost."""

import fcntl
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from umbra.deploy.commands.runs import RECENT, command
from umbra.deploy.prepare.preflight import search_path
from umbra.deploy.run_folder import RunFolder, read_object, read_rows
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config, to_json
from umbra.services.generator.command import evaluate
from umbra.services.monitor.run_address import RunAddress, find_address, find_run
from umbra.services.process.files import LOCK, folder_lock, is_held


def made(name: str, begun: float, *, steps: int = 0, code: int | None = None) -> RunFolder:
    """The folder of a run that began `begun` seconds after the epoch, in `runs/` here."""
    folder = RunFolder(Path("runs").resolve() / name)
    folder.logs.mkdir(parents=True)
    folder.config.write_text(json.dumps({"run": {"name": "mine", "steps": 100}}))
    os.utime(folder.config, (begun, begun))
    rows = [{"kind": "step", "step": n, "reward/mean": n / 100} for n in range(1, steps + 1)]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    folder.metrics.write_text(text + '{"kind":"step","st')
    if code is not None:
        ended = {"exit_code": code, "exit_reason": "because", "accuracy_after": 0.75}
        folder.summary.write_text(json.dumps(ended))
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- which run is meant ----------------------------------------------------------------------------


def test_a_run_is_named_by_its_folder_its_id_or_not_at_all() -> None:
    assert RunFolder.create("runs", "org/model").path.parent == Path("runs").resolve()
    with pytest.raises(UsageError, match="no run is in"):
        find_run()
    old, new = (made(name, begun).path for name, begun in (("old", 1.0), ("new", 2.0)))
    RunAddress("tcp://h:1", "keys").write(old)
    assert find_run("old") == find_run("runs/old") == find_run(str(old)) == old
    assert find_run() == new
    with pytest.raises(UsageError, match="neither it nor runs/older is a folder"):
        find_run("older")
    # The newest is over, so commands are for the newest that is under way.
    with folder_lock(old, "held by"):
        assert find_address() == find_address("old") == RunAddress("tcp://h:1", "keys")
        with pytest.raises(UsageError, match=r"new is not under way; `umbra up .*new` resumes it"):
            find_address("new")
        RunAddress.forget(old)
        (new / "config.json").unlink()  # as a demo that makes its model
        for held, said in ((old, "old is starting: its buffer"), (new, "new is starting")):
            with nullcontext() if held == old else folder_lock(held, "held by"):
                with pytest.raises(UsageError, match=said):
                    find_address()
        (old / "summary.json").touch()
        with pytest.raises(UsageError, match="old is ending"):
            find_address()
    # That of a run that was killed is still there, and is not asked.
    RunAddress("tcp://h:1").write(made("killed", 3.0).path)
    with pytest.raises(UsageError, match="killed is not under way"):
        find_address("killed")
    with pytest.raises(UsageError, match="is under way: name a run's folder"):
        find_address()


def test_an_address_that_was_spoiled_is_none(tmp_path: Path) -> None:
    for content in ("", "[]", '{"broker": 1}', "\x00"):
        (tmp_path / "address.json").write_text(content)
        assert RunAddress.read(tmp_path) is None
    RunAddress("tcp://h:1").write(tmp_path)
    assert json.loads((tmp_path / "address.json").read_text())["broker"] == "tcp://h:1"


# -- umbra runs ------------------------------------------------------------------------------------


def listed() -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(command, ["--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.output.splitlines()]
    return {row["id"]: row for row in rows}


def test_what_became_of_each_oldest_first() -> None:
    made("well", 30.0, steps=25, code=0)
    made("badly", 10.0, steps=2, code=7)
    made("killed", 50.0)
    made("drained", 60.0, code=143)
    going = made("going", 40.0, steps=1)
    with going.held():
        found = listed()
    assert [(name, run["state"]) for name, run in found.items()] == [
        ("badly", "failed"), ("well", "ended"), ("going", "under way"),
        ("killed", "interrupted"), ("drained", "interrupted"),
    ]  # fmt: skip
    well = found["well"]
    assert (well["steps"], well["goal"], well["accuracy"]) == (25, 100, 0.75)
    assert well["reward"] == pytest.approx(sum(range(26 - RECENT, 26)) / RECENT / 100)
    assert well["reason"] == "because"
    assert found["killed"]["reward"] is None


@pytest.mark.timeout(30)
def test_what_others_put_there_neither_ends_nor_hangs_the_list() -> None:
    """Damaged files, pipes in the place of files, and names that steer a terminal."""
    texts = "null", '{"exit_code": "x"}', "{", '{"accuracy_after": 1' + "0" * 400 + "}"
    for index, text in enumerate(texts):
        made(f"odd-{index}", index, code=0).summary.write_text(text)
    rows = '{"kind":"step","reward/mean":"x"}\n{"kind":"step","step":[],"reward/mean":1e999}\n'
    made("rows", 10.0).metrics.write_text(rows)
    made("goal", 11.0).config.write_text('{"run": {"steps": "many", "name": 7}}')
    piped = made("piped", 12.0)
    for path in (piped.summary, piped.metrics, piped.path / ".lock"):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    made("\x1b[31mred", 13.0, code=0)
    (Path("runs") / "pipe").mkdir()
    os.mkfifo(Path("runs") / "pipe" / "config.json")
    os.utime(made("late", 14.0, code=0).config, (0, 2**40))
    found = listed()
    damaged = {"odd-1", "odd-3", "rows", "goal"}
    assert {name for name, run in found.items() if run["state"] == "damaged"} == damaged
    assert found["goal"]["reason"].startswith("ValueError: invalid literal for int()")
    assert len(found) == 9
    done = CliRunner().invoke(command, [])
    assert done.exit_code == 0, done.exception
    assert "\x1b" not in done.output and " [31mred" in done.output


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", ['{"kind":"rollout"}\n', '{"kind":[]}\n', None])
def test_rollouts_that_no_run_has_written_are_refused(text: str | None) -> None:
    folder = made("odd", 1.0)
    if text is None:
        os.mkfifo(folder.samples)
    else:
        folder.samples.write_text(text)
    with pytest.raises(UsageError, match=r"samples\.jsonl (holds what no run|cannot be read)"):
        CliRunner().invoke(command, ["odd", "--samples", "1"], catch_exceptions=False)


# -- files of a run that is resumed or looked at ---------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path, "run")
    made.config.write_bytes(to_json(RunConfig()))
    made.origin.write_text(json.dumps({"search": []}))
    made.summary.write_text(json.dumps({"exit_code": 5}))
    made.buffer.write_text(json.dumps({"ledger": {}}))
    made.metrics.write_text('{"kind": "step"}\n')
    return made


def test_what_lies_in_a_folder_is_found_after_a_move(folder: RunFolder, tmp_path: Path) -> None:
    """As of a run begun from Python: prompts and functions lie in it, the model elsewhere."""
    prompts, elsewhere = folder.inputs / "prompts.jsonl", f"{folder.path}-2/model"
    settings = [f"data.prompts={prompts}", f"model.path={elsewhere}"]
    folder.config.write_bytes(to_json(load_config(overrides=settings, environ={})))
    folder.write_origin([folder.inputs, tmp_path])
    moved = RunFolder(folder.path.rename(tmp_path / "größer"))
    config = load_config(moved.config, environ={})
    assert (config.data.prompts, config.model.path) == (str(moved.inputs / prompts.name), elsewhere)
    assert search_path(moved.config)[:2] == [moved.inputs, tmp_path]


@pytest.mark.parametrize("left", [b"", b'{"ledger": "\xff', b"[]", b"[" * 10_000])
def test_files_that_were_cut_off(folder: RunFolder, left: bytes) -> None:
    """Those that decide how the run goes on are refused by name, others tell nothing."""
    folder.buffer.write_bytes(left)
    assert read_object(folder.buffer) == {}
    folder.metrics.write_bytes(left + b'\n{"kind": "step"}\n')
    assert [row["kind"] for row in read_rows(folder.metrics)] == ["step"]
    folder.origin.write_bytes(left)
    with pytest.raises(UsageError, match=r"origin\.json .*remove it, and modules"):
        folder.read_origin()
    folder.summary.write_bytes(left)
    with pytest.raises(UsageError, match=r"summary\.json .*remove it, and the run goes on"):
        RunFolder.existing(folder.path)


def test_what_a_run_does_not_need_to_go_on(folder: RunFolder) -> None:
    folder.logs.rmdir()
    for path in (folder.summary, folder.buffer, folder.metrics, folder.origin):
        path.unlink()
    again = RunFolder.existing(folder.path)
    again.forget_end()
    assert again.logs.is_dir()
    again.metrics.touch()
    again.model.mkdir()
    with pytest.raises(UsageError, match="give --prompts FILE"):
        CliRunner().invoke(evaluate, [str(again.path)], catch_exceptions=False)
    assert (read_object(again.buffer), list(read_rows(again.metrics))) == ({}, [])
    with pytest.raises(UsageError, match="Not a directory; name another folder"):
        RunFolder.create(folder.config, "run")


@pytest.mark.parametrize("left", [None, b"", b"999999999"])
def test_a_lock_is_of_a_process_and_not_of_a_file(folder: RunFolder, left: bytes | None) -> None:
    """And whether it is held is seen without taking it."""
    lock = folder.path / LOCK
    if left is not None:
        lock.write_bytes(left)
    assert not is_held(folder.path)
    with folder.held(), pytest.raises(UsageError, match="is under way"):
        assert is_held(folder.path)
        with folder.held():
            pass
    assert not is_held(folder.path)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # is_held has let go of it
