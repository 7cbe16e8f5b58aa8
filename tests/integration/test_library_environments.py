"""Environments of other libraries: TRL's as they are, the others with stand-ins for packages."""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.agents import AgentWorld
from fakes.library_worlds import LibraryPlay, call
from fakes.trajectories import sample

from umbra.proto.errors import UsageError
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.loading import load_environment
from umbra.services.environments.pool import open_pool
from umbra.services.environments.verifiers import verifiers_program
from umbra.services.generator.command import make_task
from umbra.services.prompts import read_source

# TRL 1.16: public methods are the tools.
_TRL = '''
class Sums:
    def reset(self, prompt, target, **kwargs):
        self.total, self.target = 0, target
        return f" up to {target}"

    def add(self, number: int) -> int:
        """
        Add a number to the sum.

        Args:
            number: Summand.

        Returns:
            The sum.
        """
        if number < 0:
            raise ValueError("no negative numbers")
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total == self.target)


def brevity(completions, target, environments, log_metric, **kwargs):
    log_metric("turns", len(completions[0]))
    assert environments[0].target == target[0]
    return [1.0 / len(completions[0])]


def never(completions, **kwargs):
    return [None]


class Bare:
    def reset(self, **kwargs):
        return None
'''

# Environments end with what their one turn says: "error", "group" and so on are for tests.
_V1 = """
import asyncio, contextlib, os
from types import SimpleNamespace as Thing
from umbra.services.environments.agent_program import request

serving = []
env_config_type = lambda taskset_id, env_id: Config
EvalClientConfig = Thing
ModelContext = lambda model, client: Thing(client=client)


async def chat(base_url, key, prompt):
    body = {"messages": [{"role": "user", "content": prompt}]}
    status, answer = await request(base_url + "/chat/completions", key, body)
    return answer["choices"][0]["message"]["content"]


class Config:
    @staticmethod
    def model_validate(tree):
        return Thing(tree=tree, taskset=Thing(task=None))


class Data:
    def __init__(self, values):
        self.values = values

    @staticmethod
    def model_validate(values):
        return Data(values)

    def model_dump(self, mode):
        return self.values


class Task:
    def __init__(self, data, config):
        self.data = data

    @staticmethod
    def data_type():
        return Data


class Taskset:
    INFINITE = False

    @staticmethod
    def task_type():
        return Task

    def shuffle(self, seed):
        return [Task(Data({"prompt": f"say {n}", "n": n}), None) for n in range(16)]


class Environment:
    def __init__(self, config):
        self.config, self.taskset = config, Taskset()

    @contextlib.asynccontextmanager
    async def serving(self):
        serving.append(self)
        try:
            yield
        finally:
            with open("served", "a") as file:
                file.write("ended")

    async def run_episode(self, task, context):
        assert len(serving) == 1
        for _ in range(3):
            await asyncio.sleep(0)  # it reads the key whenever it likes
        key = os.environ[context.client.api_key_var]
        said = await chat(context.client.base_url, key, task.data.values["prompt"])
        trace = Thing(
            agent=Thing(trainable=True),
            errors=[Thing(type="TaskError", message="no luck")] if said == "error" else [],
            rewards={"right": Thing(value=0.5)} | ({"judge": None} if said == "unscored" else {}),
            reward=0.5,
            metrics={"turns": 1.0},
            is_truncated=said == "cut",
        )
        return Thing(ok=said != "error", errors=[], traces=[trace] * (1 + (said == "two")))


def load_environment(config):
    if config.tree["agent"]["harness"]["id"] != "null":
        raise ValueError("no such harness")
    return Environment(config)
"""
_OPENENV = """
class Result:
    def __init__(self, observation, reward=None, done=False):
        self.observation, self.reward, self.done = observation, reward, done


class GenericEnvClient:
    def __init__(self, base_url, message_timeout_s):
        assert base_url.startswith("http://127.0.0.1:")

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    async def reset(self, secret=3):
        self.secret = secret
        return Result({"hint": "below 10", "done": False})

    async def step(self, action):
        number = action.get("number")
        if not str(number).isdigit():
            raise RuntimeError("Server error: not a number (code: VALIDATION_ERROR)")
        if int(number) == 9:
            raise RuntimeError("Server error: it broke (code: EXECUTION_ERROR)")
        right = int(number) == self.secret
        return Result({"hint": "right" if right else "no"}, 1.0 if right else -0.5, right)
"""
ACTION = {"type": "object", "properties": {"number": {"type": "integer"}, "metadata": {}}}


@pytest.fixture
def game(tmp_path: Path) -> Iterator[str]:
    """The URL of a server, as far as it is asked over HTTP; its client is in the test's folder."""
    (tmp_path / "openenv.py").write_text(_OPENENV)
    (tmp_path / "schema").write_text(json.dumps({"action": ACTION}))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def write_verifiers(folder: Path) -> str:
    """Put verifiers into `folder`; return the name of its taskset."""
    package = folder / "verifiers"
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.4.0"\n')
    (package / "v1.py").write_text(_V1)
    return "tasks-there"


ROW = {"prompt": "add numbers", "target": 5}


def heard(world: AgentWorld) -> str:
    request = world.runner.engine.requests[-1]  # type: ignore[attr-defined]
    return world.settings.chat.text(request.prompt_ids)


def test_a_class_for_trl_is_played_as_trl_plays_it(library_play: LibraryPlay) -> None:
    turns = (
        call("add", '{"number": 2}') + call("add", '{"number": 3}'),
        call("add", '{"number": -1}') + call("subtract", "{}"),
        "done",
    )
    world = library_play("trl", _TRL, *turns, id="theirs:Sums")
    world.add(sample(ROW))
    trajectory = world.trajectory()
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (1.0, 3, "stop")
    assert trajectory.reward_parts == {"tool_calls": 4.0, "failed_calls": 2.0, "Sums": 1.0}
    text = heard(world)
    assert "add numbers up to 5" in text
    errors = ("{'error': 'no negative numbers'}", "{'error': 'unknown tool subtract'}")
    for answer in ("2", "5", *errors):
        assert f"<tool_response>{answer}</tool_response>" in text


@pytest.mark.parametrize("place", ["runner"])
def test_rewards_of_trl_are_added_to_that_of_the_class_and_rounds_of_tools_limited(
    library_play: LibraryPlay,
) -> None:
    """In a runner, which tells the generator all of it."""
    rewards = {"theirs:brevity": 2.0, "theirs:never": 5.0}
    turns = [call("add", '{"number": 5}')] + [call("add", '{"number": 0}')] * 8
    settings = {"id": "theirs:Sums", "reward": rewards, "options": {"tool_rounds": 2}}
    world = library_play("trl", _TRL, *turns, **settings)
    world.add(sample(ROW))
    trajectory = world.trajectory()
    assert (trajectory.turns, trajectory.finish_reason) == (3, "turns")
    assert trajectory.reward == pytest.approx(1.0 + 2.0 / 5)
    parts = {"brevity": 1 / 5, "turns": 5.0, "tool_calls": 2.0, "failed_calls": 0.0, "Sums": 1.0}
    assert trajectory.reward_parts == pytest.approx(parts)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id": "theirs:Bare"}, "has no method get_reward: name a function"),
        ({"id": "theirs:brevity"}, "do not fit 'trl'"),
        ({"id": "theirs:Sums", "options": {"depth": 2}}, "do not fit 'trl'"),
        ({"id": ""}, "needs environment.id"),
    ],
)
@pytest.mark.usefixtures("own_modules")
def test_what_is_no_environment_of_trl_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    (tmp_path / "theirs.py").write_text(_TRL)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=says):
        load_environment(EnvironmentConfig(kind="trl", **changes))


def test_episodes_of_verifiers_end_as_it_says(tmp_path: Path, library_play: LibraryPlay) -> None:
    name = write_verifiers(tmp_path)
    row = {"prompt": "go", "task_data": {"prompt": "say"}}
    world = library_play("verifiers", "", "fine", id=name)
    world.add(*(sample(row, sample_id=f"s{n}") for n in range(3)))
    for _ in range(3):
        trajectory = world.trajectory()
        assert (trajectory.reward, trajectory.finish_reason) == (0.5, "stop")
        assert trajectory.reward_parts == {"right": 0.5, "turns": 1.0}
    world.add(sample({"prompt": "go"}, sample_id="bare"))
    assert "needs rows made by `umbra make-task" in world.failed()
    world.close()
    assert (tmp_path / "served").read_text() == "ended", "what episodes share is not closed"
    faults = {
        "error": "TaskError: no luck",
        "two": "ran 2 agents",
        "unscored": "its reward judge was not computed",
    }
    for said, reason in faults.items():
        world = library_play("verifiers", "", said, id=name)
        world.add(sample(row))
        assert reason in world.failed()


def test_samples_of_several_generators_keep_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None
) -> None:
    """Of sessions, which `verifiers` reads from the environment whenever it likes."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    play: Callable[..., Any] = verifiers_program(write_verifiers(tmp_path), {}, "theirs")
    asked: list[Any] = []

    async def chat(*of: str) -> None:
        asked.append(of[:2])

    monkeypatch.setattr(sys.modules["verifiers.v1"], "chat", chat)

    async def together() -> None:
        endpoints = [{"base_url": f"http://g/{key}", "api_key": key} for key in "ab"]
        row = {"prompt": "p", "task_data": {"prompt": "p"}}
        await asyncio.gather(*(play(row, endpoint) for endpoint in endpoints))
        for keeper in asyncio.all_tasks() - {asyncio.current_task()}:
            keeper.cancel()

    asyncio.run(together())
    assert sorted(asked) == [("http://g/a", "a"), ("http://g/b", "b")]


def test_tasks_of_verifiers_become_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None
) -> None:
    monkeypatch.chdir(tmp_path)

    def made(*options: str) -> None:
        arguments = ["verifiers:tasks-there", *options, "--out", "data", "--environment", "mine"]
        CliRunner().invoke(make_task, [*arguments, "--heldout", "2"], catch_exceptions=False)

    with pytest.raises(UsageError, match=r"needs verifiers, 0\.4 or newer: install it here, or"):
        made()
    name = write_verifiers(tmp_path)
    with pytest.raises(UsageError, match="no such harness"):
        made("--option", "agent.harness.id=x")
    options = {"agent": {"harness": {"id": "x"}}}
    with pytest.raises(UsageError, match="no such harness"):
        open_pool(EnvironmentConfig(kind="verifiers", id=name, options=options))
    made()
    rows = [prompt.row for prompt in read_source("data/prompts.jsonl")]
    held = Path("data/heldout.jsonl").read_text().splitlines()
    assert (len(rows), len(held)) == (14, 2)
    first = {"environment": "mine", "prompt": "say 0", "task_data": {"prompt": "say 0", "n": 0}}
    assert rows[0] == first
    assert not list(Path("data").glob("demos*"))


def test_a_game_of_openenv_is_played_by_calls(game: str, library_play: LibraryPlay) -> None:
    turns = (
        call("act", '{"number": 7}') + call("look", "{}"),
        call("act", '{"number": "x"}'),
        call("act", '{"number": 4}') + call("act", '{"number": 9}'),  # the game is over before
    )
    world = library_play("openenv", "", *turns, id=game)
    world.add(sample({"prompt": "guess", "reset": {"secret": 4}}))
    trajectory = world.trajectory()
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (0.5, 3, "stop")
    text = heard(world)
    assert 'guess\n{"hint": "below 10"}' in text
    for answer in ('{"hint": "no"}', "error: there is no tool 'look', only act", "not a number"):
        assert answer in text


def test_a_game_of_openenv_is_played_by_words(game: str, library_play: LibraryPlay) -> None:
    options = {"text": "number", "observation": "hint"}
    world = library_play("openenv", "", "7", "3", id=game, options=options)
    world.add(sample({"prompt": "guess"}))
    assert world.trajectory().reward == 0.5
    assert "guess\nbelow 10" in heard(world)
    world = library_play("openenv", "", "9", id=game, options=options)
    world.add(sample({"prompt": "guess"}))
    assert "the server failed: Server error: it broke" in world.failed()


def test_a_server_of_openenv_that_is_none_is_refused(
    game: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"id": "http://127.0.0.1:9"}, "gives no schema of actions"),
        ({"id": "theirs:app"}, "is no URL of an OpenEnv server: start its app"),
        ({"id": game, "options": {"text": "word"}}, "has the fields number, metadata"),
        ({"id": game, "options": {"word": 1}}, "do not fit 'openenv'"),
    ]
    for changes, says in cases:
        with pytest.raises(UsageError, match=says):
            open_pool(EnvironmentConfig(kind="openenv", **changes))
