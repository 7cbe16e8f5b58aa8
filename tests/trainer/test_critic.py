"""The critic on one process: what it learns, when, and how it comes back from a directory."""

from contextlib import closing
from pathlib import Path
from threading import current_thread
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fakes.fixtures import Closes
from fakes.rank_bench import Trainer, make_batches
from torch import Tensor

from umbra.proto.errors import UmbraError
from umbra.services.trainer import critic as critic_module
from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.critic import HEAD_FILE, Critic, worker
from umbra.services.trainer.distributed.ranks import Ranks

LOSS = "umbra.services.trainer.critic.value_loss"


@pytest.fixture
def batch() -> TrainBatch:
    return make_batch(make_batches(1)[0], 1000)


@pytest.fixture
def opened(directory: Path, closes: Closes) -> Any:
    """Makes trainers with a critic."""

    def make(**keys: Any) -> Trainer:
        chosen = {"objective": "ppo_critic", "critic.learning_rate": 1e-2}
        return closes(Trainer(directory, **{**chosen, **keys}))

    return make


def constant_returns(batch: TrainBatch) -> Tensor:
    return torch.full((len(batch.behaviour),), 0.7, dtype=torch.float64)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_values_begin_at_zero_and_approach_the_returns(
    opened: Any, batch: TrainBatch, precision: str
) -> None:
    critic = opened(precision=precision, **{"critic.value_clip": 0.0}).critic
    values = critic.values(batch)
    assert not values.any()
    losses = []
    for _ in range(32):
        losses.append(critic.learn(values, constant_returns(batch))["critic/loss"])
        values = critic.values(batch)
    assert losses[0] is None, "the loss of a batch comes with the next"
    assert 0.02 < losses[1] <= 0.7**2 / 2, "the first passes begin at values of 0"
    assert losses[-1] < losses[1] / 2
    assert (values - 0.7).abs().mean() < 0.3


def test_a_value_depends_on_what_came_before_it_alone(opened: Any, batch: TrainBatch) -> None:
    """Packing many samples into a row changes no value."""
    found = []
    for pack_tokens in (16, 128):
        critic = opened(pack_tokens=pack_tokens).critic
        critic.learn(critic.values(batch), batch.behaviour.double())
        found.append(critic.values(batch))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)
    assert found[0].std() > 0


def test_a_critic_comes_back_from_its_directory(
    opened: Any, batch: TrainBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = opened().critic
    critic.learn(critic.values(batch), constant_returns(batch))
    out = critic.export(tmp_path / "critic")
    again = opened(**{"critic.path": str(out)}).critic
    torch.testing.assert_close(again.values(batch), critic.values(batch))
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(critic_module, "save_file", full)
    with pytest.raises(UmbraError, match=r"critic: .*No space left .*: make room there"):
        critic.export(tmp_path / "critic")
    assert [path.name for path in tmp_path.iterdir()] == ["critic"], "and the older one is there"
    assert (out / HEAD_FILE).exists()


def test_it_warms_up_before_the_policy_learns(opened: Any) -> None:
    trainer = opened(**{"critic.warmup_steps": 1})
    before = trainer.learner.weights()["model.embed_tokens.weight"].clone()
    for step, learns in enumerate((False, True)):
        row = trainer.train(step + 1).row
        assert (row["updates"], row["critic/loss"] is not None) == (learns, learns)
        after = trainer.learner.weights()["model.embed_tokens.weight"]
        assert torch.equal(after, before) != learns


def test_a_failure_while_it_learns_is_raised_by_the_next_batch(
    opened: Any, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic = opened().critic
    values = critic.values(batch)
    monkeypatch.setattr(LOSS, Mock(side_effect=RuntimeError("out of memory")))
    critic.learn(values, constant_returns(batch))
    with pytest.raises(RuntimeError, match="out of memory"):
        critic.values(batch)


@pytest.mark.parametrize("world", [1, 2])
def test_several_ranks_learn_where_it_is_called(
    opened: Any, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    """Collectives of two threads would be in another order on each rank, and hang."""
    trainer, threads = opened(), list[str]()

    def loss(values: Tensor, *_: object) -> Tensor:
        threads.append(current_thread().name)
        return values.square()

    monkeypatch.setattr(LOSS, loss)
    monkeypatch.setattr(trainer.learner.ranks, "world", world)
    monkeypatch.setattr("umbra.services.trainer.learner.shard", lambda *_: None)
    monkeypatch.setattr(Ranks, "sum", lambda _, tensor: tensor)
    with closing(Critic(trainer.config, trainer.learner)) as critic:
        critic.learn(critic.values(batch), constant_returns(batch))
    assert critic.settle()["critic/loss"] is not None
    assert set(threads) == {"umbra-critic_0" if world == 1 else current_thread().name}


def test_its_thread_computes_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with GPU 0."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    gpu = torch.device("cuda", 3)
    with worker(gpu) as thread:
        thread.submit(int).result()
    assert chosen == [gpu]
