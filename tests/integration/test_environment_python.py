"""Environments in a Python of their own, which has nothing of ours; and how they are closed."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.fixtures import Closes
from fakes.players import Player
from fakes.slowness import seconds
from fakes.waiting import until

from umbra.proto.errors import UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.protocol import EpisodeOutcome, Opening, StepResult

USER_CODE = """
import asyncio, importlib.util, os, sys, time
from umbra.services.environments.protocol import StepResult

class Bare:
    def __init__(self, folder="."):
        self.folder = folder
    def reset(self, row):
        self.row = row
        found = [n for n in ("msgspec", "torch", "click") if importlib.util.find_spec(n)]
        return [{"role": "user", "content": f"{found} {row['blob']!r} {row['number']}"}]
    def step(self, response):
        if response == "raise":
            raise KeyError("gold")
        if response == "hang":
            time.sleep(600)
        if response == "pid":
            return StepResult(reward=float(os.getpid()), reward_parts={"a": 1.0})
        return StepResult(done=False, messages=[{"role": "user", "content": response}])
    def close(self):
        with open(os.path.join(self.folder, "closed"), "a") as file:
            file.write(self.row["name"])
        if self.row["name"] == "slow":
            time.sleep(600)

class Waiting(Bare):
    async def step(self, response):
        if response == "hang":
            await asyncio.sleep(600)
        return super().step(response)
    async def close(self):
        await asyncio.sleep(0)
        super().close()

async def program(row, endpoint):
    return 1.0
"""
Start = Callable[..., Player]


class OwnPlayer(Player):
    def play(self, key: str, *responses: str, **row: Any) -> EpisodeOutcome:
        values = {"name": key, "blob": b"\x00\xff", "number": 1 << 63}
        return super().play(key, *responses, **values, **row)


def pythons() -> Iterator[Any]:
    """This one without its packages, and others of this machine as they are."""
    yield pytest.param("bare", id="without packages")
    for version in ("3.10", "3.12", "3.13"):
        found = next(
            iter(sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))), None
        )
        path = shutil.which(f"/usr/bin/python{version}") or (found and str(found))
        missing = pytest.mark.skipif(not path, reason=f"there is no Python {version} here")
        yield pytest.param(path, id=version, marks=missing)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: Closes) -> Start:
    (tmp_path / "bare_env.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)

    def make(kind: str = "Bare", **changes: Any) -> Player:
        values: dict[str, Any] = {"timeout_s": 30.0, "workers": 1, **changes}
        config = EnvironmentConfig(
            kind=f"bare_env:{kind}", options={"folder": str(tmp_path)}, **values
        )
        return closes(OwnPlayer(config))

    return make


@pytest.mark.parametrize("python", list(pythons()))
def test_a_python_of_its_own_needs_nothing_of_ours(
    start: Start, bare_python: str, python: str
) -> None:
    assert importlib.util.find_spec("msgspec"), "else this shows nothing"
    player = start(python=bare_python if python == "bare" else python)
    opened = player.play("a").value
    blob = repr(b"\x00\xff")
    assert opened == Opening([{"role": "user", "content": f"[] {blob} {1 << 63}"}])
    result = player.play("a", "pid").value
    assert isinstance(result, StepResult)
    assert result.reward > 0
    assert result.reward_parts == {"a": 1.0}
    assert "raised KeyError: 'gold'" in player.play("a", "raise").error


def test_what_holds_for_ours_holds_there(start: Start, bare_python: str) -> None:
    player = start(python=bare_python, timeout_s=seconds(1.0), memory_mb=2048)
    assert "took longer than environment.timeout_s" in player.play("a", "hang").error
    assert isinstance(player.play("b", "pid").value, StepResult)


def test_a_python_that_is_none_is_named(start: Start, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"environment.python = nowhere/python is no program"):
        start(python="nowhere/python")
    ends = tmp_path / "ends"
    ends.write_text("#!/bin/sh\nexit 3\n")
    ends.chmod(0o755)
    with pytest.raises(UsageError, match=r"ended \(exit code 3\) when it was started"):
        start(python=str(ends))


def closed(tmp_path: Path) -> str:
    file = tmp_path / "closed"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("kind", ["Bare", "Waiting"])
def test_environments_are_closed_when_their_samples_are_over(
    start: Start, tmp_path: Path, kind: str
) -> None:
    player = start(kind)
    player.play("a")
    player.pool.forget("a")
    assert "KeyError" in player.play("b", "raise").error
    player.pool.forget("b")
    player.play("c")  # one at a time, the others are closed before; else beside it
    until(lambda: closed(tmp_path) == "ab", lambda: closed(tmp_path))
    player.pool.close()
    assert closed(tmp_path) == "abc"


def test_a_close_that_hangs_costs_its_process_and_no_sample(start: Start, tmp_path: Path) -> None:
    player = start(timeout_s=seconds(1.0))
    player.play("slow")
    player.pool.forget("slow")
    assert isinstance(player.play("next", "pid").value, StepResult)
    assert closed(tmp_path) == "slow"
