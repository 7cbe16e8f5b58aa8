"""Functions that reward whole groups, in the processes that run them."""

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fakes.broker_world import trajectory
from fakes.trajectories import sample
from msgspec.structs import asdict, replace

from umbra.proto.errors import UsageError
from umbra.proto.records import Score, Task, pack_int32
from umbra.services.config import (
    BufferConfig,
    EnvironmentConfig,
    ModelConfig,
    NamedEnvironment,
    RunConfig,
)
from umbra.services.generator.checks import check_environment
from umbra.services.modeling.chat import Chat
from umbra.services.scorer.service import reward_worker

DOC = Path(__file__).parents[2] / "docs" / "environments.md"
STOP = 3
CODE = """
import os

def faulty(completions, **columns):
    if "raise" in completions[0]:
        raise ValueError("no such thing")
    if "die" in completions[0]:
        os._exit(3)
    return [float(len(completions))] * len(completions)

def few(completions, **columns):
    return [1.0]

def longest(completions, environment, **columns):
    assert set(environment) == {"longest"}
    return [float(len(own) == max(map(len, completions))) for own in completions]

def shared(completions, environment, **columns):
    assert set(environment) == {"shared"}
    return [float(completions.count(own)) for own in completions]
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    (documented,) = [block for block in blocks if "def rank(" in block]
    (tmp_path / "grouped.py").write_text(documented + CODE)
    monkeypatch.chdir(tmp_path)


def rewards(function: str) -> EnvironmentConfig:
    name, how = f"grouped:{function}", {"timeout_s": 60.0, "workers": 1}
    return EnvironmentConfig(kind="reward", reward=name, reward_scope="group", **how)


def scored(model: Path, chat: Chat, *groups: list[str], **environments: Any) -> list[list[Score]]:
    """The scores of `groups`, each its environment (or its name) and what its samples said."""
    config = RunConfig(
        model=ModelConfig(path=str(model)), buffer=BufferConfig(stages=["reward"]), **environments
    )
    tasks: list[Task] = []
    for name, *said in groups:
        row = {"prompt": "p", "answer": "1", "environment": name}
        for number, text in enumerate(said):
            task = sample(row, sample_id=f"{name}-{number}", group_id=name)
            ids = pack_int32([*chat.text_ids(text, begins=False), STOP])
            tasks.append(replace(task, attempt=2, trajectory=trajectory(task, response_ids=ids)))
    worker = reward_worker(config)
    with closing(worker.pool):
        found = {scores[0].sample_id[:-2]: scores for scores in worker.score(tasks, lambda: None)}
    return [found[name] for name, *_ in groups]


def test_the_function_of_the_docs_ranks_each_group(tiny_model_dir: Path, chat: Chat) -> None:
    groups = ["a", "1", "2", "221", "1"], ["b", "2", "3"]
    first, second = scored(tiny_model_dir, chat, *groups, environment=rewards("rank"))
    assert [score.reward for score in first] == [0.75, 0.0, 0.25, 0.375]
    assert [(score.sample_id, score.reward) for score in second] == [("b-0", 0), ("b-1", 0)]
    assert all(score.attempt == 2 for score in (*first, *second))


def test_what_goes_wrong_in_a_group_costs_that_group(tiny_model_dir: Path, chat: Chat) -> None:
    groups = [[name, name, "x"] for name in ("raise", "die", "fine")]
    raises, dies, fine = scored(tiny_model_dir, chat, *groups, environment=rewards("faulty"))
    told = "environment grouped:faulty raised ValueError: no such thing"
    assert [told in score.error for score in raises] == [True, True]
    assert ["the process of its environment ended" in one.error for one in dies] == [True, True]
    assert [score.reward for score in fine] == [2.0, 2.0]


def test_each_group_is_rewarded_by_the_functions_of_its_environment(
    tiny_model_dir: Path, chat: Chat
) -> None:
    """Without its stop strings, which are no part of what was said."""
    sampling = {"longest": {}, "shared": {"stop": ["3"]}}
    environments = [
        NamedEnvironment(name=name, sampling=own, **asdict(rewards(name)))
        for name, own in sampling.items()
    ]
    alone = NamedEnvironment(name="alone", kind="reward", reward="of_no_use:here")
    groups = ["longest", "1", "123"], ["shared", "12", "1", "13"]
    first, second = scored(tiny_model_dir, chat, *groups, environments=(*environments, alone))
    assert [score.reward for score in first] == [0.0, 1.0]
    assert [score.reward for score in second] == [1.0, 2.0, 2.0]


def test_a_reward_that_cannot_take_a_group_is_told_before_the_run() -> None:
    row = {"prompt": "p"}
    check_environment(RunConfig(environment=rewards("faulty")), row)
    told = r"returned \[1.0\] instead of a list with one number for each of 8 completions"
    with pytest.raises(UsageError, match=told):
        check_environment(RunConfig(environment=rewards("few")), row)
