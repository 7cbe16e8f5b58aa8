"""Effects of a lost file of a run's folder, when the run is resumed or looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from umbra.deploy.prepare.preflight import search_path
from umbra.deploy.run_folder import RunFolder, read_object, read_rows
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config, to_json


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


@pytest.mark.parametrize("left", [b"", b'{"search"', b"[]", b"[" * 10_000])
def test_an_origin_that_was_cut_off_is_refused_by_name(folder: RunFolder, left: bytes) -> None:
    folder.origin.write_bytes(left)
    with pytest.raises(UsageError, match=r"origin\.json .*remove it, and modules"):
        folder.read_origin()


@pytest.mark.parametrize("left", [b"", b'{"exit', b"3", b"[" * 10_000])
def test_a_summary_that_was_cut_off_is_refused_by_name(folder: RunFolder, left: bytes) -> None:
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
def test_a_lock_is_that_of_a_process_and_not_of_a_file(
    folder: RunFolder, left: bytes | None
) -> None:
    lock = folder.path / "lock"
    if left is not None:
        lock.write_bytes(left)
    with folder.held(), pytest.raises(UsageError, match="is under way"), folder.held():
        pass
    with folder.held():
        assert lock.is_file()
