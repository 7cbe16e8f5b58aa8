"""Answers of environments on their way from a process to its pool, and how both are closed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.fixtures import Closes
from fakes.players import Player
from fakes.slowness import seconds, until

from umbra.services.config import EnvironmentConfig
from umbra.services.environments.protocol import EpisodeOutcome, Opening, StepResult

USER_CODE = """
import asyncio, os, time
from umbra.services.environments.protocol import StepResult

class Number(float):
    pass  # as numpy's are

class Own:
    def __init__(self, folder="."):
        self.folder = folder
    def reset(self, row):
        self.row = row
        return [{"role": "user", "content": f"{row['blob']!r} {row['number']}"}]
    def step(self, response):
        if response == "raise":
            raise KeyError("gold")
        if response == "pid":
            return StepResult(reward=float(os.getpid()), reward_parts={"a": 1.0})
        more = {"made": object()} if response == "object" else {"number": Number(1.5)}
        return StepResult(done=False, messages=[{"role": "user", "content": response, **more}])
    def close(self):
        with open(os.path.join(self.folder, "closed"), "a") as file:
            file.write(self.row["name"])
        if self.row["name"] == "slow":
            time.sleep(600)

class Waiting(Own):
    async def step(self, response):
        return super().step(response)
    async def close(self):
        await asyncio.sleep(0)
        super().close()
"""
Start = Callable[..., Player]


class OwnPlayer(Player):
    def play(self, key: str, *responses: str, **row: Any) -> EpisodeOutcome:
        values = {"name": key, "blob": b"\x00\xff", "number": 1 << 63}
        return super().play(key, *responses, **values, **row)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: Closes) -> Start:
    (tmp_path / "own_env.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)

    def make(kind: str = "Own", **changes: Any) -> Player:
        values: dict[str, Any] = {"timeout_s": 30.0, "workers": 1, **changes}
        config = EnvironmentConfig(
            kind=f"own_env:{kind}", options={"folder": str(tmp_path)}, **values
        )
        return closes(OwnPlayer(config))

    return make


def test_answers_come_as_they_were_made(start: Start) -> None:
    player = start()
    blob = repr(b"\x00\xff")
    opened = player.play("a").value
    assert opened == Opening([{"role": "user", "content": f"{blob} {1 << 63}"}])
    said = player.play("a", "said").value
    assert isinstance(said, StepResult)
    assert said.messages == [{"role": "user", "content": "said", "number": 1.5}]
    result = player.play("a", "pid").value
    assert isinstance(result, StepResult)
    assert result.reward > 0
    assert result.reward_parts == {"a": 1.0}
    assert "answer: <object object" in player.play("a", "object").error
    assert "raised KeyError: 'gold'" in player.play("a", "raise").error


def closed(tmp_path: Path) -> str:
    file = tmp_path / "closed"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize("kind", ["Own", "Waiting"])
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
