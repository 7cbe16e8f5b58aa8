"""Folders of runs: what `umbra runs` tells of each, and effects of a file that is lost."""

import json
import os
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


def listed() -> dict[str, dict[str, Any]]:
    done = CliRunner().invoke(command, ["--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.output.splitlines()]
    return {row["id"]: row for row in rows}


def test_what_became_of_each_oldest_first() -> None:
    made("well", 30.0, steps=25, code=0)
    made("badly", 10.0, steps=2, code=7)
    made("stopped", 20.0, steps=3, code=130)
    made("killed", 50.0)
    made("drained", 60.0, code=143)
    going = made("going", 40.0, steps=1)
    with going.held():
        found = listed()
    assert {name: run["state"] for name, run in found.items()} == {
        "badly": "failed", "stopped": "interrupted", "well": "ended", "going": "under way",
        "killed": "interrupted", "drained": "interrupted",
    }  # fmt: skip
    assert list(found) == ["badly", "stopped", "well", "going", "killed", "drained"]
    well = found["well"]
    assert (well["steps"], well["goal"], well["accuracy"]) == (25, 100, 0.75)
    assert well["reward"] == pytest.approx(sum(range(26 - RECENT, 26)) / RECENT / 100)
    assert well["reason"] == "because"
    assert found["killed"]["reward"] is None


@pytest.mark.timeout(30)
def test_what_others_put_there_neither_ends_nor_hangs_the_list() -> None:
    """Damaged files, pipes in the place of files, and names that steer a terminal."""
    for index, text in enumerate(
        (
            "null",
            "[1]",
            '{"exit_code": "x", "accuracy_after": "high"}',
            '{"accuracy_after": NaN}',
            "{",
            '{"accuracy_after": 1' + "0" * 400 + "}",
        )
    ):
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
    late = made("late", 14.0, code=0)
    os.utime(late.config, (0, 2**40))
    found = listed()
    damaged = {"odd-2", "odd-5", "rows", "goal"}
    assert {name for name, run in found.items() if run["state"] == "damaged"} == damaged
    assert found["goal"]["reason"].startswith("ValueError: invalid literal for int()")
    assert len(found) == 11
    done = CliRunner().invoke(command, [])
    assert done.exit_code == 0, done.exception
    assert "\x1b" not in done.output and " [31mred" in done.output


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", ['{"kind":"rollout"}\n', '{"kind":"x"}\n', '{"kind":[]}\n', None])
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
    made.samples.write_text('{"kind": "rollout"}\n')
    made.model.mkdir()
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


@pytest.mark.parametrize("left", [b"", b'{"exit', b"[]", b"3", b"[" * 10_000])
def test_a_file_that_was_cut_off_is_refused_by_name(folder: RunFolder, left: bytes) -> None:
    folder.origin.write_bytes(left)
    with pytest.raises(UsageError, match=r"origin\.json .*remove it, and modules"):
        folder.read_origin()
    folder.summary.write_bytes(left)
    with pytest.raises(UsageError, match=r"summary\.json .*remove it, and the run goes on"):
        RunFolder.existing(folder.path)


@pytest.mark.parametrize("name", ["summary", "buffer", "metrics", "samples", "logs", "model"])
def test_what_a_run_does_not_need_to_go_on(folder: RunFolder, name: str) -> None:
    path: Path = getattr(folder, name)
    path.rmdir() if path.is_dir() else path.unlink()
    again = RunFolder.existing(folder.path)
    again.forget_end()
    assert again.logs.is_dir()
    assert read_object(again.buffer) == {}
    assert bool(list(read_rows(again.metrics))) == (name != "metrics")


@pytest.mark.parametrize("left", [b"", b'{"ledger": "\xff', b"[]", b"[" * 10_000])
def test_a_spoiled_status_and_torn_metrics_tell_nothing(folder: RunFolder, left: bytes) -> None:
    folder.buffer.write_bytes(left)
    assert read_object(folder.buffer) == {}
    folder.metrics.write_bytes(left + b'\n{"kind": "step"}\n')
    assert [row["kind"] for row in read_rows(folder.metrics)] == ["step"]


@pytest.mark.parametrize("left", [None, b"", b"no number", b"999999999"])
def test_a_lock_is_of_a_process_and_not_of_a_file(folder: RunFolder, left: bytes | None) -> None:
    lock = folder.path / "lock"
    if left is not None:
        lock.write_bytes(left)
    with folder.held(), pytest.raises(UsageError, match="is under way"), folder.held():
        pass
    with folder.held():
        assert lock.is_file()
