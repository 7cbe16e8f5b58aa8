"""The workers of the scoring stages, with a real tokenizer and a tiny model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.broker_world import trajectory

from umbra.proto.records import SampleTask, ScoringTask, pack_int32, unpack_float32
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.single_turn import ExactMatch
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_model, load_tokenizer
from umbra.services.runtime.config import Scorer
from umbra.services.scorer.logprobs import LogprobWorker
from umbra.services.scorer.reward import RewardWorker

STOP = 3


def scoring_task(name: str, response: list[int], mask: bytes, row: dict[str, Any]) -> ScoringTask:
    task = SampleTask(sample_id=name, group_id="g", prompt_id="p", attempt=1, row=row, lease_s=30.0)
    made = trajectory(
        task, 0, prompt_ids=pack_int32([5, 6]), response_ids=pack_int32(response), loss_mask=mask
    )
    return ScoringTask(sample_id=name, attempt=4, row=row, lease_s=30.0, trajectory=made)


@pytest.fixture
def reward_worker(tiny_model_dir: Path) -> Iterator[RewardWorker]:
    wake = threading.Event()
    chat = Chat(load_tokenizer(tiny_model_dir), {STOP})
    worker = RewardWorker(chat, InlinePool(ExactMatch), wake.wait)
    yield worker
    worker.close()


def test_rewards_are_those_of_the_environment(
    reward_worker: RewardWorker, tiny_model_dir: Path
) -> None:
    one = load_tokenizer(tiny_model_dir)("1", add_special_tokens=False)["input_ids"]
    tasks = [
        scoring_task("right", [*one, STOP], b"\1\1", {"prompt": "x", "answer": "1"}),
        scoring_task("wrong", [*one, STOP], b"\1\1", {"prompt": "x", "answer": "2"}),
        scoring_task("broken", [*one, STOP], b"\1\1", {"prompt": "x"}),
    ]
    scores = {s.sample_id: s for s in reward_worker.score(tasks, lambda: None)}
    assert (scores["right"].reward, scores["wrong"].reward) == (1.0, 0.0)
    assert scores["right"].attempt == 4
    assert "answer" in scores["broken"].error


def test_logprobs_are_those_of_the_model(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir, torch.device("cpu"), torch.float32)
    worker = LogprobWorker(model, Scorer(), lambda: 7)
    tasks = [
        scoring_task("a", [7, 8, 9, STOP], b"\1\0\1\1", {}),
        scoring_task("b", [9, STOP], b"\1\1", {}),
    ]
    for task, score in zip(tasks, worker.score(tasks, lambda: None), strict=True):
        assert (score.sample_id, score.version) == (task.sample_id, 7)
        ids = torch.tensor([[5, 6, *torch.frombuffer(
            bytearray(task.trajectory.response_ids), dtype=torch.int32).tolist()]])  # fmt: skip
        with torch.no_grad():
            found = model(ids).logits[0, 1:-1].log_softmax(-1).gather(1, ids[0, 2:, None])[:, 0]
        mask = torch.tensor(list(task.trajectory.loss_mask))
        assert score.logprobs is not None
        assert unpack_float32(score.logprobs) == pytest.approx((found * mask).tolist(), abs=1e-5)
