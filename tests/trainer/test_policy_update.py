"""A batch's update as the configuration combines the pieces: what reaches the gradient."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fakes.closeness import assert_same_sums, rounding, same_sum
from fakes.rank_bench import HEAD, VERSION, Gradients, Trainer, noisy_trajectories, update
from msgspec.structs import replace

from umbra.proto.records import Branch, Trajectory, pack_float32
from umbra.services.config.presets import PRESETS
from umbra.services.trainer.batch import BatchError, make_batch
from umbra.services.trainer.metrics import sample_metrics
from umbra.services.trainer.objectives.advantages import gae
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import minibatches

TERMS = 600  # two layers, forward and backward, of 64 units at most, and a small vocabulary


@pytest.fixture(scope="module")
def trajectories(directory: Path) -> list[Trajectory]:
    return noisy_trajectories(load_policy(directory)[0])


def assert_equal(one: Gradients, other: Gradients) -> None:
    for name, gradient in one.items():
        assert_same_sums(gradient, other[name], terms=TERMS, what=name)


def differ(one: Gradients, other: Gradients) -> bool:
    return any(
        float((g - other[name]).abs().max()) > 100 * rounding(TERMS) * float(g.abs().max())
        for name, g in one.items()
    )


def changed(trajectories: list[Trajectory], index: int, **fields: Any) -> list[Trajectory]:
    return [replace(t, **fields) if at == index else t for at, t in enumerate(trajectories)]


@pytest.mark.parametrize(
    "chosen",
    [
        *({"objective": n, "kl_coef": 0.1} for n in PRESETS if n not in ("ppo_critic", "prime_rl")),
        {"objective": "prime_rl"},
        {"objective": "naive", "score_centering": HEAD},
        {"objective": "tis", "is_cap": 1.0, "score_centering": HEAD},
    ],
    ids=lambda chosen: "-".join(map(str, chosen.values())),
)
@pytest.mark.parametrize("minibatches", [1, 2])
def test_micro_batches_change_nothing(
    chosen: dict[str, Any], minibatches: int, directory: Path, trajectories: list[Trajectory]
) -> None:
    keys = {**chosen, "minibatches": minibatches}
    whole, row = update(directory, trajectories, "ref_logp", **keys, pack_tokens=64)
    cut, other = update(directory, trajectories, "ref_logp", **keys, pack_tokens=8, micro_tokens=8)
    assert_equal(whole, cut)
    for key, value in row.items():
        assert (other[key] is None) == (value is None), key
        # The averaged terms are of the size of an advantage, or of a logprob.
        assert (other[key] or 0.0) == same_sum(value or 0.0, terms=TERMS, scale=5.0), key
    assert row["updates"] == minibatches
    assert None not in (row["ratio/max"], row["kl"])
    assert row["outliers"] == 0
    if keys.pop("score_centering", 0):
        assert differ(whole, update(directory, trajectories, "ref_logp", **keys)[0])


def test_what_later_epochs_do_to_the_ratio(directory: Path, trajectories: list[Trajectory]) -> None:
    """p is that before the first epoch, and the effective share of samples falls with each."""
    chosen: dict[str, Any] = {"objective": "naive", "optimizer": "sgd", "learning_rate": 1.0}
    one, many = (
        Trainer(directory, epochs=epochs, **chosen).learn(trajectories, VERSION)
        for epochs in (1, 8)
    )
    assert one["clip_fraction"] == 0
    assert one["ess_last"] == pytest.approx(one["ess"])
    assert (many["clip_fraction"] or 0) > 0
    assert many["ess"] == same_sum(one["ess"] or 0.0, terms=TERMS), "of the weights before"
    assert (many["ess_last"] or 1) < (many["ess"] or 0)


def test_minibatches() -> None:
    """The first pass has some of every group in each part; the others an order of their own."""
    samples = torch.arange(10, 22)
    parts = minibatches(samples, 3, 3, "7/4")
    assert [part.tolist() for part in parts[:3]] == [[*range(n, 22, 3)] for n in (10, 11, 12)]
    passes = [torch.cat(parts[start : start + 3]) for start in (0, 3, 6)]
    for one in passes:
        assert sorted(one.tolist()) == samples.tolist()
    assert len({tuple(one.tolist()) for one in passes}) == 3
    first, again, other = (
        torch.cat(minibatches(samples, 3, 3, seed)).tolist() for seed in ("7/4", "7/4", "7/5")
    )
    assert first == again != other
    assert minibatches(samples[:0], 0, 2, "") == []


def test_stage_logp_stands_in_for_a_pass(directory: Path, trajectories: list[Trajectory]) -> None:
    """Where the stage found what the trainer would, the update is the same."""
    noiseless = noisy_trajectories(load_policy(directory)[0], spread=0.0)
    same = [
        replace(noisy, proximal_logprobs=plain.logprobs)
        for noisy, plain in zip(trajectories, noiseless, strict=True)
    ]
    band = {"mask": "geometric", "mask_low": 0.8, "mask_high": 1.2}
    for objective, more in (("decoupled", {}), ("icepop", {}), ("tis", band)):
        keys = {"objective": objective, "minibatches": 2, **more}
        passed, row = update(directory, same, **keys)
        staged, _ = update(directory, same, "logp", **keys, proximal="stage")
        assert_equal(passed, staged)
        assert row["mask_fraction"] is not None
        if more:
            assert 0 < row["mask_fraction"] < 1
    keys = {"objective": "tis", "minibatches": 2}
    other, _ = update(directory, trajectories, "logp", **keys, proximal="stage")
    passed, _ = update(directory, trajectories, **keys)
    assert differ(passed, other), "the stage's logprobs are used"


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("ref_logprobs", None, "no {field}, which the objective needs: put .* buffer.stages"),
        ("proximal_logprobs", None, "no {field}, which the objective needs: put .* buffer.stages"),
        ("ref_logprobs", b"1234" * 99, r"{field} has 396 bytes for \d tokens"),
        ("proximal_logprobs", pack_float32([float("nan")] * 5), "{field} has values that are not"),
    ],
)
def test_logprobs_that_are_missing_or_wrong_are_named(
    field: str, value: Any, told: str, directory: Path, trajectories: list[Trajectory]
) -> None:
    at = [t.response_tokens for t in trajectories].index(5)
    broken = changed(trajectories, at, **{field: value})
    keys = {"objective": "decoupled", "proximal": "stage", "kl_coef": 0.1}
    sample = f"sample {trajectories[at].sample_id} .*"
    with pytest.raises(BatchError, match=sample + told.format(field=field)):
        update(directory, broken, "ref_logp", "logp", **keys)


def test_samples_without_advantage_are_trained_only_if_the_loss_has_more_than_advantages(
    directory: Path, trajectories: list[Trajectory]
) -> None:
    flat = [replace(t, reward=1.0) if t.group_id == "g1" else t for t in trajectories]
    assert update(directory, flat)[1]["trained_samples"] == 8
    assert update(directory, flat, entropy_coef=0.01)[1]["trained_samples"] == 12
    assert update(directory, flat, "ref_logp", kl_coef=0.01)[1]["trained_samples"] == 12
    rewarded = update(directory, flat, "ref_logp", kl_coef=0.01, objective="reinforce_pp")
    assert rewarded[1]["trained_samples"] == 12, "the KL in the reward makes them differ"


def test_filtered_samples_reach_neither_gradient_nor_token_count(
    directory: Path, trajectories: list[Trajectory]
) -> None:
    """Their rewards still count in the group's mean."""
    keys = {"objective": "dapo", "overlong_filter": True}
    gradients, row = update(directory, trajectories, **keys)
    assert row["trained_samples"] == sum(t.finish_reason != "length" for t in trajectories)
    noisier = [
        replace(t, logprobs=t.ref_logprobs) if t.finish_reason == "length" else t
        for t in trajectories
    ]
    same, _ = update(directory, noisier, **keys)
    assert_equal(gradients, same)
    with_all, _ = update(directory, trajectories, objective="dapo")
    assert differ(gradients, with_all)


def test_a_critic_gives_values_and_gets_returns(
    directory: Path, trajectories: list[Trajectory]
) -> None:
    critic = Mock(values=lambda batch: batch.behaviour / 2)
    critic.learn.return_value = {"value_loss": 0.5}
    _, row = update(directory, trajectories, critic=critic, objective="ppo_critic")
    assert (row["value_loss"], row["trained_samples"]) == (0.5, 12)
    values, returns = critic.learn.call_args.args
    batch = make_batch(trajectories, vocab_size=1000)
    rewards = torch.zeros(len(batch.behaviour), dtype=torch.float64)
    last = torch.tensor([t.response_tokens for t in trajectories]).cumsum(0) - 1
    rewards[last] = batch.rewards
    torch.testing.assert_close(returns, gae(rewards, values, batch.tokens.owner, 1.0, 0.95)[1])


# -- samples of several lines, each of weight 1 / k -----------------------------------------------

BRANCHED = {1: 2, 4: 3, 5: 2}  # samples, and the lines of each


def together(lines: list[Trajectory]) -> Trajectory:
    """One sample of these lines; all but their tokens is that of the first."""
    further = [{name: getattr(t, name) for name in Branch.__struct_fields__} for t in lines[1:]]
    scored = {
        name: b"".join(getattr(line, name) for line in lines)
        for name in ("ref_logprobs", "proximal_logprobs")
    }
    return replace(lines[0], branches=[Branch(**one) for one in further], **scored)


def repeated(trajectories: list[Trajectory]) -> list[Trajectory]:
    """`trajectories`, some of them as several lines that say the same."""
    return [together([one] * BRANCHED.get(at, 1)) for at, one in enumerate(trajectories)]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("denominator", ["trained", "all"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_every_mean_counts_the_sample_once(
    aggregation: str,
    denominator: str,
    minibatches: int,
    directory: Path,
    trajectories: list[Trajectory],
) -> None:
    keys: dict[str, Any] = {"aggregation": aggregation, "minibatches": minibatches}
    if aggregation != "constant":
        keys["denominator"] = denominator
    plain, _ = update(directory, trajectories, "ref_logp", **keys)
    branched, row = update(directory, repeated(trajectories), "ref_logp", **keys, pack_tokens=16)
    assert_equal(plain, branched)  # of the last update: lines of a sample are in the same one
    assert row["updates"] == minibatches


def test_each_line_has_its_share(directory: Path, trajectories: list[Trajectory]) -> None:
    """The gradient of a sample of two lines is the mean of the gradients of either line alone."""
    one, two = trajectories[1], trajectories[6]
    # The same sample with either line: their rewards, and so all advantages, are equal.
    fields = (*Branch.__struct_fields__, "ref_logprobs", "proximal_logprobs")
    either = [one, replace(one, **{name: getattr(two, name) for name in fields})]

    def gradient(sample: Trajectory) -> Gradients:
        made = [*trajectories[:1], sample, *trajectories[2:]]
        return update(directory, made, "ref_logp", objective="ppo", aggregation="constant")[0]

    alone = [gradient(line) for line in either]
    assert differ(*alone)
    both = gradient(together(either))
    assert_equal({name: (alone[0][name] + alone[1][name]) / 2 for name in both}, both)


def test_what_metrics_tell(trajectories: list[Trajectory]) -> None:
    made = repeated(trajectories)
    plain, row = (sample_metrics(make_batch(t, 1000), VERSION) for t in (trajectories, made))
    for name in ("samples", "reward/mean", "reward/std", "turns", "staleness/total/max", "solved"):
        assert row[name] == plain[name], name
    assert (plain["branches/mean"], plain["branches/max"]) == (1.0, 1.0)
    assert (row["branches/mean"], row["branches/max"]) == (16 / 12, 3.0)
    extra = sum((lines - 1) * trajectories[at].response_tokens for at, lines in BRANCHED.items())
    total = sum(one.response_tokens for one in trajectories) + extra
    assert row["response_length/mean"] == pytest.approx(total / 12)
    assert (row["tokens"] or 0) > (plain["tokens"] or 0)


def test_samples_without_the_sampler_s_likeliest_tokens_cannot_be_centered(
    directory: Path, trajectories: list[Trajectory]
) -> None:
    support = trajectories[1].support
    assert support is not None
    vocabulary = load_policy(directory)[0].config.vocab_size
    for changed_to in (None, replace(support, logprobs=None)):
        made = changed(trajectories, 1, support=changed_to)
        make_batch(made, vocabulary)
        with pytest.raises(BatchError, match="sample s0-1 of"):
            make_batch(made, vocabulary, centered=True)


def test_a_teacher_gives_the_advantages(directory: Path, trajectories: list[Trajectory]) -> None:
    """Rewards are not read, and groups of one are trained on like any other."""
    found, row = update(directory, trajectories, "ref_logp", objective="opd")
    paid = [replace(t, reward=0.0, group_id=t.sample_id) for t in trajectories]
    other, _ = update(directory, paid, "ref_logp", objective="opd")
    assert_equal(found, other)
    assert row["trained_samples"] == len(trajectories)
