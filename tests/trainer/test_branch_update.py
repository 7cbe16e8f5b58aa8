"""Samples of several lines: what one of k lines, of weight 1 / k, does to the gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.closeness import assert_same_sums, rounding, same_sum
from fakes.noisy_batch import Recorder, noisy_trajectories
from torch import Tensor

from umbra.proto.records import Branch, Trajectory
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.config.presets import PRESETS
from umbra.services.config.rules import branch_faults
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.metrics import Row, environment_metrics, sample_metrics
from umbra.services.trainer.objectives.aggregation import count, token_weights
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import PolicyUpdate

VERSION = 3
TERMS = 600
BRANCHED = {1: 2, 4: 3, 5: 2}  # samples, and the lines of each
Gradients = dict[str, Tensor]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, hidden=32, ff=64)
    return path


@pytest.fixture(scope="module")
def trajectories(directory: Path) -> list[Trajectory]:
    return noisy_trajectories(load_policy(directory)[0])


def settings(directory: Path, **keys: Any) -> RunConfig:
    common = {"threads": 1, "device": "cpu"}
    overrides = [f"trainer.{key}={value}" for key, value in (common | keys).items()]
    environment = [f"environment.{one}" for one in ("kind=agent", "agent=my:a", "branches=train")]
    stages = 'buffer.stages=["ref_logp"]'
    return load_config(
        overrides=[
            *overrides,
            *environment,
            stages,
            f"model.path={directory}",
            "sampling.max_tokens=8",
        ],
        environ={},
    )


def update(directory: Path, trajectories: list[Trajectory], **keys: Any) -> tuple[Gradients, Row]:
    """The gradients of the last update, and the row."""
    config = settings(directory, **keys)
    learner = Recorder(load_policy(directory)[0], config.trainer, steps=1)
    batch = make_batch(trajectories, learner.model.config.vocab_size)
    row = PolicyUpdate(config, learner)(batch, VERSION, lambda: True)
    assert row is not None
    return learner.gradients, row


def as_branch(line: Trajectory) -> Branch:
    return Branch(**{name: getattr(line, name) for name in Branch.__struct_fields__})


def together(lines: list[Trajectory]) -> Trajectory:
    """One sample of these lines; all but their tokens is that of the first."""
    first, *further = lines
    scored = {
        name: b"".join(getattr(line, name) for line in lines)
        for name in ("ref_logprobs", "proximal_logprobs")
    }
    return msgspec.structs.replace(first, branches=[as_branch(one) for one in further], **scored)


def repeated(trajectories: list[Trajectory]) -> list[Trajectory]:
    """`trajectories`, some of them as several lines that say the same."""
    return [together([one] * BRANCHED.get(at, 1)) for at, one in enumerate(trajectories)]


def assert_equal(one: Gradients, other: Gradients) -> None:
    for name, gradient in one.items():
        assert_same_sums(gradient, other[name], terms=TERMS, what=name)


def differ(one: Gradients, other: Gradients) -> bool:
    """By far more than rounding explains."""
    return any(
        float((gradient - other[name]).abs().max())
        > 100 * rounding(TERMS) * float(gradient.abs().max())
        for name, gradient in one.items()
    )


def test_lines_are_what_was_put_together(trajectories: list[Trajectory]) -> None:
    lines = trajectories[:3]
    for line, found in zip(lines, together(lines).lines, strict=True):
        for name in (*Branch.__struct_fields__, "ref_logprobs", "proximal_logprobs"):
            assert getattr(found, name) == getattr(line, name), name
        assert not found.branches
    assert trajectories[0].lines[0] is trajectories[0]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "ppo_critic"])
def test_equal_lines_are_one_sample(
    preset: str, directory: Path, trajectories: list[Trajectory]
) -> None:
    keys: dict[str, Any] = {"objective": preset}
    if preset != "prime_rl":
        keys["kl_coef"] = 0.1
    plain, row = update(directory, trajectories, **keys)
    branched, other = update(directory, repeated(trajectories), **keys)
    if list(branch_faults(settings(directory, **keys))):
        assert preset == "m2po" or differ(plain, branched), "it need not be refused"
        return
    assert_equal(plain, branched)
    assert other["loss"] == same_sum(row["loss"] or 0.0, terms=TERMS, scale=5.0)
    assert other["trained_samples"] == row["trained_samples"] == len(trajectories)


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
    plain, _ = update(directory, trajectories, **keys)
    branched, row = update(directory, repeated(trajectories), **keys, pack_tokens=16)
    assert_equal(plain, branched)  # of the last update: lines of a sample are in the same one
    assert row["updates"] == minibatches


def test_each_line_has_its_share(directory: Path, trajectories: list[Trajectory]) -> None:
    """The gradient of a sample of two lines is the mean of those of either line alone."""
    one, two = trajectories[1], trajectories[6]
    # The same sample with either line: their rewards, and so all advantages, are equal.
    told = {name: getattr(two, name) for name in (*Branch.__struct_fields__, "ref_logprobs")}
    told["proximal_logprobs"] = two.proximal_logprobs
    either = [one, msgspec.structs.replace(one, **told)]

    def gradient(sample: Trajectory) -> Gradients:
        made = [*trajectories[:1], sample, *trajectories[2:]]
        return update(directory, made, objective="ppo", aggregation="token_sum")[0]

    alone = [gradient(line) for line in either]
    assert differ(*alone)
    both = gradient(together(either))
    assert_equal({name: (alone[0][name] + alone[1][name]) / 2 for name in both}, both)


def test_groups_count_a_sample_once(trajectories: list[Trajectory]) -> None:
    batch = make_batch(repeated(trajectories), 1000)
    plain = make_batch(trajectories, 1000)
    assert torch.equal(batch.rewards, plain.rewards)
    assert torch.equal(batch.groups, plain.groups)
    assert len(batch.trajectories) == len(trajectories) + 4
    sums = torch.zeros(len(trajectories), dtype=torch.float64)
    torch.testing.assert_close(sums.index_add(0, batch.sample, batch.weight), sums + 1)


def test_an_ordinary_sample_is_what_it_was(trajectories: list[Trajectory]) -> None:
    """Bit for bit: weights of one change no sum and no product."""
    batch = make_batch(trajectories, 1000)
    own = torch.bincount(batch.tokens.owner)
    part = torch.arange(1, len(own), 2)
    for denominator in ("trained", "all"):
        counts = count(denominator, own, part, 2, batch.weight)
        assert counts == count(denominator, own, part, 2)
        for aggregation in ("token_mean", "sequence_mean", "sequence_sum", "constant", "token_sum"):
            arguments = (aggregation, batch.tokens, part, counts, 8)
            assert torch.equal(token_weights(*arguments, batch.weight), token_weights(*arguments))


def test_prompts_of_lines_are_packed_once(directory: Path, trajectories: list[Trajectory]) -> None:
    made = repeated(trajectories)
    _, shared = update(directory, made, share_prompts="true")
    _, alone = update(directory, made, share_prompts="false")
    assert (shared["operations"] or 0) < (alone["operations"] or 0)


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
    named = [msgspec.structs.replace(one, prompt_id=f"wiki/{one.prompt_id}") for one in made]
    assert environment_metrics(named, ["wiki"])["environment/wiki/samples"] == 12.0
