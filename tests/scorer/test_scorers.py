"""The workers of the scoring stages, with a real tokenizer and a tiny model."""

import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.trajectories import sample, trajectory
from fakes.versions import other_weights

from umbra.proto.errors import UsageError
from umbra.proto.records import (
    Sampling,
    Task,
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
from umbra.services.trainer.policy import load_policy

STOP = 3


def task(name: str, response: list[int], row: Any = None, prompt: str = "p", **made: Any) -> Task:
    """A sample whose environment is in the name of its `prompt`; `made` is of its trajectory."""
    done = trajectory([5, 6], response, sample_id=name, prompt_id=prompt, attempt=4, **made)
    return sample(row or {}, sample_id=name, prompt_id=prompt, attempt=4, trajectory=done)


def test_rewards_are_those_of_the_environment(chat: Chat) -> None:
    """A message with a name so long is refused as a whole, which ended the scorer."""

    class Odd(ExactMatch):
        def step(self, response: str) -> StepResult:
            large = StepResult(reward_parts={"a" * 300: 1.0})
            return large if self.row.get("answer") == "odd" else super().step(response)

    one = chat.text_ids("1", begins=False)
    rows = {name: {"prompt": "x", "answer": name} for name in ("1", "2", "odd")}
    rows["none"] = {"prompt": "x"}
    tasks = [task(name, [*one, STOP], row) for name, row in rows.items()]
    worker = RewardWorker(chat, InlinePool(Odd), threading.Event())
    scores = {s.sample_id: s for (s,) in worker.score(tasks, lambda: None)}
    assert (scores["1"].reward, scores["2"].reward) == (1.0, 0.0)
    assert scores["1"].attempt == 4 and not scores["2"].error
    assert "answer" in scores["none"].error
    assert "has no short, printable name" in scores["odd"].error


def test_scorer_and_trainer_find_the_same_logprobs(model: Any, tiny_model_dir: Path) -> None:
    """Scenario: other packing, other code, the same weights. Result: the same."""
    source = random.Random(0)
    tasks: list[Task] = []
    for index in range(24):
        count = source.randint(1, 60)
        response = [source.randrange(4, 100) for _ in range(count)]
        mask = bytes([1, *(source.random() < 0.7 for _ in range(count - 1))])
        sampling = Sampling(temperature=source.choice([0.6, 1.0, 1.7]))
        tasks.append(task(f"s{index}", response, loss_mask=mask, sampling=sampling))
    worker = LogprobWorker(model, TrainerConfig(pack_tokens=64, micro_tokens=300), lambda: 7)
    scores = [score for (score,) in worker.score(tasks, lambda: None)]
    assert [(s.sample_id, s.version) for s in scores] == [(one.sample_id, 7) for one in tasks]
    found = [unpack_float32(s.logprobs or b"") for s in scores]
    policy, _ = load_policy(tiny_model_dir)
    batch = make_batch([one.made for one in tasks], policy.config.vocab_size)
    trainers = ModelScorer(policy).eval()
    expected = torch.zeros(len(batch.tokens.learned))
    with torch.no_grad():
        for micro in pack(batch.tokens, pack_tokens=256, micro_tokens=4096):
            expected[micro.source], _ = trainers(micro, batch.temperature[micro.source])
    masks = [one.made.loss_mask for one in tasks]
    learned = torch.tensor([bool(m) for mask in masks for m in mask])
    flat = torch.tensor([x for values in found for x in values])
    torch.testing.assert_close(flat[learned], expected, atol=1e-5, rtol=0)
    assert not flat[~learned].any()


def test_what_the_model_cannot_score_costs_that_sample_only(model: Any) -> None:
    worker = LogprobWorker(model, TrainerConfig())
    good, foreign, empty = task("a", [7, 8]), task("b", [7, 500]), task("c", [7, 8], prompt_ids=b"")
    greedy = task("d", [7, 8], sampling=Sampling(temperature=0.0))
    tasks = [foreign, good, empty, greedy]
    scores = {s.sample_id: s for (s,) in worker.score(tasks, lambda: None)}
    assert scores["a"].logprobs is not None and not scores["a"].error
    assert "reach from 7 to 500, but the model has 101 tokens" in scores["b"].error
    assert "no prompt tokens" in scores["c"].error
    assert "temperature 0 has no logprobs" in scores["d"].error
    assert next(worker.score([empty], lambda: None))[0].error


def test_each_environment_has_a_teacher_of_its_own(model: Any) -> None:
    """Tasks come mixed; a model that is scored by itself finds the same."""
    models = {"math": model, "code": other_weights(model, 1)}
    workers = {name: LogprobWorker(model, TrainerConfig()) for name, model in models.items()}
    tasks = [
        task(f"s{number}", [7, 8, STOP], prompt=f"{name}/{number}")
        for number, name in enumerate(("math", "code", "math"))
    ]
    together = score_by_model(workers, tasks, lambda: None)
    found = {score.sample_id: score.logprobs for [score] in together}
    for one in tasks:
        worker = workers[one.prompt_id.partition("/")[0]]
        ([alone],) = worker.score([one], lambda: None)
        near = np.frombuffer(alone.logprobs or b"", "<f4")  # rows of another length round otherwise
        assert np.frombuffer(found[one.sample_id] or b"", "<f4") == pytest.approx(near, rel=1e-6)
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
