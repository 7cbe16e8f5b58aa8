"""The workers of the scoring stages, with a real tokenizer and a tiny model."""

import itertools
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.broker_world import trajectory
from fakes.versions import other_weights
from msgspec.structs import replace

from umbra.proto.errors import UsageError
from umbra.proto.records import (
    Sampling,
    Task,
    VersionSpan,
    pack_float32,
    pack_int32,
    unpack_float32,
)
from umbra.services.config import ModelConfig, RunConfig, TrainerConfig
from umbra.services.environments.built_in import ExactMatch
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.protocol import StepResult
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.packing import pack
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.modeling.scorer import Scorer as ModelScorer
from umbra.services.scorer.logprobs import LogprobWorker, check_tokens, score_by_model
from umbra.services.scorer.service import RewardWorker
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.metrics import mismatch_row, mismatch_sums
from umbra.services.trainer.policy import load_policy

STOP = 3


def scoring_task(name: str, response: list[int], mask: bytes, row: dict[str, Any]) -> Task:
    task = Task(sample_id=name, group_id="g", prompt_id="p", attempt=1, row=row, lease_s=30.0)
    made = trajectory(
        task,
        prompt_ids=pack_int32([5, 6]),
        response_ids=pack_int32(response),
        loss_mask=mask,
        logprobs=pack_float32([-0.5] * len(response)),
        spans=[VersionSpan(version=0, start=0, end=len(response))],
    )
    return replace(task, attempt=4, trajectory=made)


@pytest.fixture
def reward_worker(chat: Chat) -> RewardWorker:
    return RewardWorker(chat, InlinePool(ExactMatch), threading.Event())


def test_rewards_are_those_of_the_environment(reward_worker: RewardWorker, chat: Chat) -> None:
    one = chat.text_ids("1", begins=False)
    tasks = [
        scoring_task("right", [*one, STOP], b"\1\1", {"prompt": "x", "answer": "1"}),
        scoring_task("wrong", [*one, STOP], b"\1\1", {"prompt": "x", "answer": "2"}),
        scoring_task("broken", [*one, STOP], b"\1\1", {"prompt": "x"}),
    ]
    scores = {s.sample_id: s for (s,) in reward_worker.score(tasks, lambda: None)}
    assert (scores["right"].reward, scores["wrong"].reward) == (1.0, 0.0)
    assert scores["right"].attempt == 4
    assert "answer" in scores["broken"].error


def test_a_reward_that_the_buffer_would_refuse_is_the_samples_error(
    reward_worker: RewardWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message with a name so long is refused as a whole, which ended the scorer."""
    large = StepResult(reward_parts={"a" * 300: 1.0})
    monkeypatch.setattr(
        ExactMatch, "step", lambda self, _: large if self.row["odd"] else StepResult()
    )
    tasks = [
        scoring_task(name, [STOP], b"\1", {"prompt": "x", "odd": name == "odd"})
        for name in ("odd", "even")
    ]
    scores = {s.sample_id: s for (s,) in reward_worker.score(tasks, lambda: None)}
    assert "has no short, printable name" in scores["odd"].error
    assert not scores["even"].error


def test_scorer_and_trainer_find_the_same_logprobs(model: Any, tiny_model_dir: Path) -> None:
    """Scenario: other packing, other code, the same weights. Result: k3 far below 1e-5."""
    source = random.Random(0)
    tasks: list[Task] = []
    for index in range(24):
        count = source.randint(1, 60)
        response = [source.randrange(4, 100) for _ in range(count)]
        mask = bytes([1, *(source.random() < 0.7 for _ in range(count - 1))])
        task = scoring_task(f"s{index}", response, mask, {})
        sampling = Sampling(temperature=source.choice([0.6, 1.0, 1.7]))
        made = replace(task.made, sampling=sampling, logprobs=pack_float32([0.0] * count))
        tasks.append(replace(task, trajectory=made))
    worker = LogprobWorker(model, TrainerConfig(pack_tokens=64, micro_tokens=300), lambda: 7)
    scores = [score for (score,) in worker.score(tasks, lambda: None)]
    assert [(s.sample_id, s.version) for s in scores] == [(task.sample_id, 7) for task in tasks]
    found = [unpack_float32(s.logprobs or b"") for s in scores]
    policy, _ = load_policy(tiny_model_dir)
    batch = make_batch([task.made for task in tasks], policy.config.vocab_size)
    trainers = ModelScorer(policy).eval()
    expected = torch.zeros(len(batch.tokens.learned))
    with torch.no_grad():
        for micro in pack(batch.tokens, pack_tokens=256, micro_tokens=4096):
            expected[micro.source], _ = trainers(micro, batch.temperature[micro.source])
    masks = [task.made.loss_mask for task in tasks]
    learned = [m for mask in masks for m in mask]
    flat = [x for x, m in zip(itertools.chain(*found), learned, strict=True) if m]
    every = torch.ones(len(flat)).bool()
    row = mismatch_row(mismatch_sums(torch.tensor(flat), expected, every, every))
    assert row["mismatch/k3"] == pytest.approx(0.0, abs=1e-10)
    for values, mask in zip(found, masks, strict=True):
        assert not any(x for x, m in zip(values, mask, strict=True) if not m)


def test_what_the_model_cannot_score_costs_that_sample_only(model: Any) -> None:
    worker = LogprobWorker(model, TrainerConfig())
    good, foreign, empty = (scoring_task(n, [7, 8], b"\1\1", {}) for n in ("a", "b", "c"))
    foreign = replace(foreign, trajectory=replace(foreign.made, response_ids=pack_int32([7, 500])))
    empty = replace(empty, trajectory=replace(empty.made, prompt_ids=b""))
    scores = {s.sample_id: s for (s,) in worker.score([foreign, good, empty], lambda: None)}
    assert scores["a"].logprobs is not None and not scores["a"].error
    assert "reach from 7 to 500, but the model has 101 tokens" in scores["b"].error
    assert "no prompt tokens" in scores["c"].error
    assert next(worker.score([empty], lambda: None))[0].error


def test_greedy_samples_are_scored_by_the_plain_softmax(model: Any) -> None:
    worker = LogprobWorker(model, TrainerConfig())
    task = scoring_task("a", [7, 8, 9], b"\1\1\1", {})
    greedy = replace(task, trajectory=replace(task.made, sampling=Sampling(temperature=0.0)))
    ((plain,),), ((found,),) = (list(worker.score([t], lambda: None)) for t in (task, greedy))
    assert plain.logprobs == found.logprobs


def test_each_environment_has_a_teacher_of_its_own(model: Any) -> None:
    """Tasks come mixed; a model that is scored by itself finds the same."""
    models = {"math": model, "code": other_weights(model, 1)}
    workers = {name: LogprobWorker(model, TrainerConfig()) for name, model in models.items()}
    tasks = [
        replace(one, prompt_id=f"{name}/{one.sample_id}")
        for number, name in enumerate(("math", "code", "math"))
        for one in [scoring_task(f"s{number}", [7, 8, STOP], b"\1\1\1", {})]
    ]
    together = score_by_model(workers, tasks, lambda: None)
    found = {score.sample_id: score.logprobs for [score] in together}
    for task in tasks:
        worker = workers[task.prompt_id.partition("/")[0]]
        ([alone],) = worker.score([task], lambda: None)
        near = np.frombuffer(alone.logprobs or b"", "<f4")  # rows of another length round otherwise
        assert np.frombuffer(found[task.sample_id] or b"", "<f4") == pytest.approx(near, rel=1e-6)
    assert found["s0"] == found["s2"] != found["s1"]


def test_a_teacher_with_other_tokens_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = RunConfig(model=ModelConfig(path=str(tiny_model_dir)))
    same = shutil.copytree(tiny_model_dir, tmp_path / "same")
    check_tokens(config, str(same))
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    tokenizer = load_tokenizer(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(UsageError, match=r"scorer\.model: .*/other has other tokens than model"):
        check_tokens(config, str(other))
