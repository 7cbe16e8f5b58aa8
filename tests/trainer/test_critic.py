"""The critic on one process: what it learns, when, and how it comes back from a directory."""

from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from fakes import rank_bench
from fakes.rank_bench import make_batches
from torch import Tensor

from umbra.proto.errors import UmbraError
from umbra.services.config import RunConfig
from umbra.services.trainer import critic as critic_module
from umbra.services.trainer.batch import TrainBatch, make_batch
from umbra.services.trainer.critic import HEAD_FILE, Critic, open_critic, worker
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import PolicyUpdate


@pytest.fixture
def batch() -> TrainBatch:
    return make_batch(make_batches(1)[0], 1000)


def configured(directory: Path, **keys: Any) -> RunConfig:
    chosen = {
        "objective": "ppo_critic",
        "device": "cpu",
        "threads": 1,
        "critic.learning_rate": 1e-2,
    }
    return rank_bench.configured(directory, **{**chosen, **keys})


def opened(config: RunConfig) -> tuple[Learner, Critic]:
    AcceleratorState._reset_state()  # a process has one precision, but here
    model, _ = load_policy(config.model.path)
    learner = Learner(model, config.trainer, 10)
    critic = open_critic(config, learner)
    assert critic is not None
    return learner, critic


def constant_returns(batch: TrainBatch) -> Tensor:
    return torch.full((len(batch.behaviour),), 0.7, dtype=torch.float64)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_values_begin_at_zero_and_approach_the_returns(
    directory: Path, batch: TrainBatch, precision: str
) -> None:
    config = configured(directory, precision=precision, **{"critic.value_clip": 0.0})
    _, critic = opened(config)
    values = critic.values(batch)
    assert not values.any()
    losses = []
    for _ in range(32):
        losses.append(critic.learn(values, constant_returns(batch))["critic/loss"])
        values = critic.values(batch)
    assert losses[0] is None, "the loss of a batch comes with the next"
    assert losses[1] is not None
    assert 0.02 < losses[1] <= 0.7**2 / 2, "the first passes begin at values of 0"
    assert losses[-1] is not None
    assert losses[-1] < losses[1] / 2
    assert (values - 0.7).abs().mean() < 0.3
    critic.close()


def test_a_value_depends_on_what_came_before_it_alone(directory: Path, batch: TrainBatch) -> None:
    """Packing many samples into a row changes no value."""
    found = []
    for pack_tokens in (16, 128):
        config = configured(directory, pack_tokens=pack_tokens)
        _, critic = opened(config)
        critic.learn(critic.values(batch), batch.behaviour.double())
        found.append(critic.values(batch))
        critic.close()
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-3)
    assert found[0].std() > 0


def test_a_critic_comes_back_from_its_directory(
    directory: Path, batch: TrainBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, critic = opened(configured(directory))
    critic.learn(critic.values(batch), constant_returns(batch))
    out = critic.export(tmp_path / "critic")
    assert (out / HEAD_FILE).exists()
    _, again = opened(configured(directory, **{"critic.path": str(out)}))
    torch.testing.assert_close(again.values(batch), critic.values(batch))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(critic_module, "save_file", full)
    with pytest.raises(UmbraError, match=r"critic: .*No space left .*: make room there"):
        critic.export(tmp_path / "critic")
    assert [path.name for path in tmp_path.iterdir()] == ["critic"], "and the older one is there"
    assert (out / HEAD_FILE).exists()
    critic.close()
    again.close()


def test_it_warms_up_before_the_policy_learns(directory: Path, batch: TrainBatch) -> None:
    config = configured(directory, **{"critic.warmup_steps": 1})
    learner, critic = opened(config)
    update = PolicyUpdate(config, learner, critic)
    before = learner.weights()["model.embed_tokens.weight"].clone()
    first = update(batch, 0, lambda: True)
    assert first is not None
    assert (first["updates"], first["critic/loss"]) == (0, None)
    assert torch.equal(learner.weights()["model.embed_tokens.weight"], before)
    second = update(batch, 1, lambda: True)
    assert second is not None
    assert (second["updates"], second["critic/loss"] is not None) == (1, True)
    assert not torch.equal(learner.weights()["model.embed_tokens.weight"], before)
    critic.close()


def test_a_failure_while_it_learns_is_raised_by_the_next_batch(
    directory: Path, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Tensor:
        raise RuntimeError("out of memory")

    _, critic = opened(configured(directory))
    values = critic.values(batch)
    monkeypatch.setattr("umbra.services.trainer.critic.value_loss", broken)
    critic.learn(values, constant_returns(batch))
    with pytest.raises(RuntimeError, match="out of memory"):
        critic.values(batch)
    critic.close()


@pytest.mark.parametrize("world", [1, 2])
def test_several_ranks_learn_where_it_is_called(
    directory: Path, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    """Collectives of two threads would be in another order on each rank, and hang."""
    config = configured(directory)
    learner, critic = opened(config)
    critic.close()
    threads: list[str] = []

    def loss(values: Tensor, *_: object) -> Tensor:
        threads.append(current_thread().name)
        return values.square()

    monkeypatch.setattr("umbra.services.trainer.critic.value_loss", loss)
    monkeypatch.setattr(learner.ranks, "world", world)
    monkeypatch.setattr("umbra.services.trainer.learner.shard", lambda *_: None)
    monkeypatch.setattr(Ranks, "sum", lambda _, tensor: tensor)
    critic = Critic(config, learner)
    critic.learn(critic.values(batch), constant_returns(batch))
    critic.close()
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
