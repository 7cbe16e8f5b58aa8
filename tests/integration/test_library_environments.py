"""Environments of other libraries, played by our programs; TRL's are played as they are."""

import sys
from typing import Any

import pytest
from fakes.agents import AgentWorld
from fakes.library_environments import TRL
from fakes.library_worlds import LibraryPlay, call
from fakes.trajectories import sample

from umbra.proto.errors import UsageError
from umbra.services.environments.loading import load_environment
from umbra.services.runtime.config import EnvironmentConfig

pytestmark = pytest.mark.e2e

ROW = {"prompt": "add numbers", "target": 5}


def heard(world: AgentWorld) -> str:
    """All that the model has read and said, as text."""
    request = world.runner.engine.requests[-1]  # type: ignore[attr-defined]
    return world._settings.chat.text(request.prompt_ids)


def test_a_class_for_trl_is_played_as_trl_plays_it(library_play: LibraryPlay) -> None:
    turns = (
        call("add", '{"number": 2}') + call("add", '{"number": 3}'),
        call("add", '{"number": -1}') + call("subtract", "{}"),
        "done",
    )
    world = library_play("trl", TRL, *turns, id="theirs:Sums")
    world.add(sample(ROW))
    trajectory = world.trajectory()
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 3, "stop")
    assert trajectory.reward_parts == {"tool_calls": 4.0, "failed_calls": 2.0, "Sums": 1.0}
    text = heard(world)
    assert "add numbers up to 5" in text
    for answer in (
        "2",
        "5",
        "{'error': 'no negative numbers'}",
        "{'error': 'unknown tool subtract'}",
    ):
        assert f"<tool_response>{answer}</tool_response>" in text


def test_rewards_of_trl_are_added_to_that_of_the_class(library_play: LibraryPlay) -> None:
    rewards = {"theirs:brevity": 2.0, "theirs:never": 5.0}
    world = library_play(
        "trl", TRL, call("add", '{"number": 5}'), "ok", id="theirs:Sums", rewards=rewards
    )
    world.add(sample(ROW))
    trajectory = world.trajectory()
    assert trajectory.reward == pytest.approx(1.0 + 2.0 / 3)
    assert trajectory.reward_parts["brevity"] == pytest.approx(1 / 3)
    assert trajectory.reward_parts["turns"] == 3.0
    assert "never" not in trajectory.reward_parts


def test_rounds_of_tools_and_turns_can_be_limited(library_play: LibraryPlay) -> None:
    turns = [call("add", '{"number": 1}')] * 9
    world = library_play("trl", TRL, *turns, id="theirs:Sums", options={"tool_rounds": 2})
    world.add(sample(ROW))
    trajectory = world.trajectory()
    assert (trajectory.turns, trajectory.finish_reason) == (3, "turns")
    assert trajectory.reward_parts["tool_calls"] == 2.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id": "theirs:Bare"}, "has no method get_reward: name a function"),
        ({"id": "theirs:brevity"}, "do not fit 'trl'"),
        ({"id": "theirs:Sums", "options": {"depth": 2}}, "do not fit 'trl'"),
        ({"id": ""}, "needs environment.id"),
    ],
)
def test_what_is_no_environment_of_trl_is_refused(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    (tmp_path / "theirs.py").write_text(TRL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    with pytest.raises(UsageError, match=says):
        load_environment(EnvironmentConfig(kind="trl", **changes))
    sys.modules.pop("theirs", None)
