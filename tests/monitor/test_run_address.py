"""The address of a run under way, and which run a person means."""

import fcntl
import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from umbra.proto.errors import UsageError
from umbra.services.monitor.run_address import RunAddress, find_address, find_run
from umbra.services.process.files import LOCK, folder_lock, is_held


def made(name: str, begun: float, broker: str = "") -> Path:
    """A run's folder in `runs/` here, with an address if it has a `broker`."""
    folder = Path("runs") / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    os.utime(folder / "config.json", (begun, begun))
    if broker:
        RunAddress(broker, "keys").write(folder)
    return folder.resolve()


def test_a_run_is_named_by_its_folder_its_id_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="no run is in"):
        find_run()
    old, new = made("old", 1.0, "tcp://h:1"), made("new", 2.0)
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
    made("killed", 3.0, "tcp://h:1")
    with pytest.raises(UsageError, match="killed is not under way"):
        find_address("killed")
    with pytest.raises(UsageError, match="is under way: name a run's folder"):
        find_address()


def test_an_address_that_was_spoiled_is_none(tmp_path: Path) -> None:
    for content in ("", "{", "[]", '{"broker": 1}', "\x00"):
        (tmp_path / "address.json").write_text(content)
        assert RunAddress.read(tmp_path) is None
    RunAddress("tcp://h:1").write(tmp_path)
    assert json.loads((tmp_path / "address.json").read_text())["broker"] == "tcp://h:1"
    assert RunAddress.read(tmp_path) == RunAddress("tcp://h:1")


def test_whether_a_folder_is_held_is_seen_without_taking_it(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    with folder_lock(tmp_path, "held by"):
        assert is_held(tmp_path)
    assert not is_held(tmp_path)
    with (tmp_path / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # is_held has let go of it
