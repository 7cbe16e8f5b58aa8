"""Trajectories become tensors, or an error that names the sample."""

from typing import Any

import msgspec
import pytest
import torch
from fakes.trajectories import trajectory as made

from umbra.proto.records import Sampling, Trajectory, VersionSpan
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.metrics import mismatch_row, mismatch_sums, sample_metrics
from umbra.services.trainer.objectives.advantages import dr_grpo

HALF = Sampling(temperature=0.5)


def trajectory(**changes: Any) -> Trajectory:
    """Two prompt and three response tokens, the middle one from the environment."""
    spans = [VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3)]
    values = {"loss_mask": b"\1\0\1", "spans": spans, "reward": 1.0, "sampling": HALF}
    return made([5, 6], [7, 8, 9], [-1.0, 0.0, -2.0], **{**values, **changes})


def test_tensors() -> None:
    second = made([1], [2], [-0.25], version=4, group_id="g2", reward=0.0)
    batch = make_batch([trajectory(), second], vocab_size=10)
    assert batch.tokens.ids.tolist() == [5, 6, 7, 8, 9, 1, 2]
    assert batch.tokens.lengths.tolist() == [5, 2]
    assert batch.tokens.learned.tolist() == [2, 4, 6]
    assert batch.tokens.owner.tolist() == [0, 0, 1]
    assert batch.behaviour.tolist() == [-1.0, -2.0, -0.25]
    assert batch.temperature.tolist() == [0.5, 0.5, 1.0]
    assert batch.groups.tolist() == [0, 1]
    assert batch.leading(4).tolist() == [False, False, True]
    assert batch.leading(3).tolist() == [True, False, False], "the second is of version 4"
    row = sample_metrics(batch, version=6)
    assert row["reward/mean"] == row["solved"] == row["multi_version"] == 0.5
    assert (row["staleness/total/mean"], row["staleness/total/max"]) == (2.5, 3.0)
    assert (row["staleness/in_flight/mean"], row["staleness/in_queue/mean"]) == (0.5, 2.0)
    assert row["response_length/mean"] == 2.0
    assert row["truncated"] == row["duplicates"] == 0.0


def test_a_reward_keeps_all_its_digits() -> None:
    rewards = [0.1, 0.1 + 1e-9]
    sent = [msgspec.msgpack.encode(trajectory(reward=reward)) for reward in rewards]
    batch = make_batch([msgspec.msgpack.decode(one, type=Trajectory) for one in sent], 10)
    assert batch.rewards.tolist() == rewards
    expected = pytest.approx([-5e-10, 5e-10], rel=1e-6)
    assert dr_grpo(batch.rewards, batch.groups).tolist() == expected


def test_samples_that_repeat_another_of_their_group_are_counted() -> None:
    again, elsewhere = trajectory(sample_id="s2"), trajectory(sample_id="s3", group_id="g2")
    batch = make_batch([trajectory(), again, elsewhere], vocab_size=10)
    assert sample_metrics(batch, version=6)["duplicates"] == pytest.approx(1 / 3)


def test_mismatch_by_hand() -> None:
    behaviour = torch.tensor([0.5, 0.5]).log()
    logprobs = torch.tensor([1.0, 0.25]).log()  # ratios 2 and 1/2
    row = mismatch_row(mismatch_sums(logprobs, behaviour, torch.tensor([False, True])))
    ln2 = 0.6931471805599453
    assert row["mismatch/k1"] == pytest.approx(0.0, abs=1e-6)
    assert row["mismatch/k3"] == pytest.approx(((1 - ln2) + (-0.5 + ln2)) / 2, abs=1e-6)
    assert row["mismatch/k3_on_policy"] == pytest.approx(-0.5 + ln2, abs=1e-6)
    assert row["ess"] == pytest.approx(2.5**2 / (2 * 4.25), abs=1e-6)
    none = mismatch_row(mismatch_sums(logprobs, behaviour, torch.tensor([False, False])))
    assert none["mismatch/k3_on_policy"] is None
    nothing = mismatch_row(mismatch_sums(torch.zeros(0), torch.zeros(0), torch.zeros(0).bool()))
    assert nothing == dict.fromkeys(none)
    spoilt = torch.tensor([torch.nan, 0.25]).log()
    one = mismatch_sums(spoilt, behaviour, torch.tensor([True, True]), torch.tensor([False, True]))
    assert mismatch_row(one)["mismatch/k3"] == pytest.approx(-0.5 + ln2, abs=1e-6)
