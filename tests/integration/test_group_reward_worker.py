"""Functions that reward whole groups, in the processes that run them."""

import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.broker_world import trajectory

from umbra.proto.errors import UsageError
from umbra.proto.records import Score, Task, pack_int32
from umbra.services.config import (
    BufferConfig,
    EnvironmentConfig,
    ModelConfig,
    NamedEnvironment,
    RunConfig,
)
from umbra.services.environments.pool import open_rewards
from umbra.services.generator.checks import check_environment
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.scorer.service import RewardWorker, reward_worker

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


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(encoding="utf-8"), re.DOTALL)
    (documented,) = [block for block in blocks if "def rank(" in block]
    (tmp_path / "grouped.py").write_text(documented + CODE)
    monkeypatch.chdir(tmp_path)


def rewards(function: str, **changes: Any) -> EnvironmentConfig:
    values: dict[str, Any] = {"timeout_s": 60.0, "workers": 1, **changes}
    name = f"grouped:{function}"
    return EnvironmentConfig(kind="reward", reward=name, reward_scope="group", **values)


@contextmanager
def scorer(config: EnvironmentConfig, model: Path) -> Iterator[RewardWorker]:
    chat = Chat(load_tokenizer(model), {STOP})
    with closing(open_rewards(RunConfig(environment=config))) as pool:
        yield RewardWorker(chat, pool, threading.Event(), whole=True)


def group(name: str, model: Path, *said: str, **columns: str) -> list[Task]:
    tokenizer = load_tokenizer(model)
    tasks: list[Task] = []
    row = {"prompt": "p", "answer": "1", **columns}
    for number, text in enumerate(said):
        sample = f"{name}-{number}"
        task = Task(sample_id=sample, group_id=name, prompt_id="p", attempt=1, row=row, lease_s=9.0)
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], STOP]
        made = trajectory(task, 0, response_ids=pack_int32(ids))
        tasks.append(msgspec.structs.replace(task, attempt=2, trajectory=made))
    return tasks


def by_group(found: list[list[Score]]) -> dict[str, list[Score]]:
    return {scores[0].sample_id.partition("-")[0]: scores for scores in found}


def test_the_function_of_the_docs_ranks_each_group(module: None, tiny_model_dir: Path) -> None:
    with scorer(rewards("rank"), tiny_model_dir) as worker:
        tasks = [
            *group("a", tiny_model_dir, "1", "2", "221", "1"),
            *group("b", tiny_model_dir, "2", "3"),
        ]
        found = by_group(list(worker.score(tasks, lambda: None)))
    assert [score.reward for score in found["a"]] == [0.75, 0.0, 0.25, 0.375]
    assert [(score.sample_id, score.reward) for score in found["b"]] == [("b-0", 0), ("b-1", 0)]
    assert all(score.attempt == 2 for scores in found.values() for score in scores)


def test_what_goes_wrong_in_a_group_costs_that_group(module: None, tiny_model_dir: Path) -> None:
    with scorer(rewards("faulty"), tiny_model_dir) as worker:
        names = ("raise", "die", "fine")
        tasks = [task for name in names for task in group(name, tiny_model_dir, name, "x")]
        found = by_group(list(worker.score(tasks, lambda: None)))
    for name, error in (
        ("raise", "environment grouped:faulty raised ValueError: no such thing"),
        ("die", "the process of its environment ended"),
    ):
        assert all(error in score.error for score in found[name]), found[name]
    assert [score.reward for score in found["fine"]] == [2.0, 2.0]


def test_each_group_is_rewarded_by_the_functions_of_its_environment(
    module: None, tiny_model_dir: Path
) -> None:
    """Without its stop strings, which are no part of what was said."""
    sampling = {"longest": {}, "shared": {"stop": ["3"]}}
    groups = [
        NamedEnvironment(name=name, sampling=own, **msgspec.structs.asdict(rewards(name)))
        for name, own in sampling.items()
    ]
    alone = NamedEnvironment(name="alone", kind="reward", reward="of_no_use:here")
    config = RunConfig(
        model=ModelConfig(path=str(tiny_model_dir)),
        environments=(*groups, alone),
        buffer=BufferConfig(stages=["reward"]),
    )
    worker = reward_worker(config)
    with closing(worker.pool):
        tasks = [
            *group("a", tiny_model_dir, "1", "123", environment="longest"),
            *group("b", tiny_model_dir, "12", "1", "13", environment="shared"),
        ]
        found = by_group(list(worker.score(tasks, lambda: None)))
    assert [score.reward for score in found["a"]] == [0.0, 1.0]
    assert [score.reward for score in found["b"]] == [1.0, 2.0, 2.0]


def test_a_reward_that_cannot_take_a_group_is_told_before_the_run(module: None) -> None:
    row = {"prompt": "p"}
    check_environment(RunConfig(environment=rewards("faulty")), row)
    told = r"returned \[1.0\] instead of a list with one number for each of 8 completions"
    with pytest.raises(UsageError, match=told):
        check_environment(RunConfig(environment=rewards("few")), row)
