"""Tokens, updates and generators that would do harm: left out, or judged and stopped."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.rank_bench import Trainer, make_batches
from torch import Tensor

from umbra.proto.errors import DivergedError
from umbra.proto.records import Trajectory, pack_float32
from umbra.services.config.loader import load_config
from umbra.services.config.presets import ObjectiveSpec
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.learner import REASONS
from umbra.services.trainer.loop import SkipLimit
from umbra.services.trainer.metrics import Row
from umbra.services.trainer.mismatch import BOUNDS, MIN_TOKENS, Compared, Verdicts, bound_of
from umbra.services.trainer.objectives.objective import TokenLosses
from umbra.services.trainer.objectives.terms import Sequences
from umbra.services.trainer.update import Guard

BATCHES = make_batches(2)


def improbable(batch: list[Trajectory], samples: int, tokens: int = 10**6) -> list[Trajectory]:
    """The same, but the generator gave next to no probability to some tokens of some samples."""

    made: list[Trajectory] = []
    for at, t in enumerate(batch):
        spoilt = min(t.response_tokens, tokens if at < samples else 0)
        logprobs = [-60.0] * spoilt + [-4.6] * (t.response_tokens - spoilt)
        made.append(msgspec.structs.replace(t, logprobs=pack_float32(logprobs)))
    return made


def harm(trainer: Trainer, patch: pytest.MonkeyPatch, kind: str) -> list[Trajectory]:
    """Have the next batch, which is returned, do harm of this kind."""
    objective, backward = trainer.update._objective, trainer.learner.backward

    def nan(*args: Any) -> TokenLosses:
        result = objective(*args)
        return dataclasses.replace(result, losses=result.losses * torch.nan)

    def huge(loss: Tensor) -> None:
        backward(loss * 1e38 * 1e10)

    if kind == "loss":
        patch.setattr(trainer.update, "_objective", nan)
    elif kind == "gradient":
        patch.setattr(trainer.learner, "backward", huge)
    return improbable(BATCHES[1], len(BATCHES[1])) if kind == "outliers" else BATCHES[1]


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("kind", REASONS)
def test_harm_is_left_out(
    directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str, minibatches: int
) -> None:
    trainer = Trainer(directory, minibatches=minibatches)

    def state() -> dict[str, Tensor]:
        held = trainer.learner.state().tensors()
        return {name: tensor.detach().clone() for name, tensor in held.items()}

    assert trainer.learn(BATCHES[0], 0)["skipped"] == 0
    before = state()
    with monkeypatch.context() as patch:
        row = trainer.learn(harm(trainer, patch, kind), 1)
    assert row["skipped"] == 1
    assert [row[f"skipped/{reason}"] for reason in REASONS] == [float(r == kind) for r in REASONS]
    after = state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = trainer.learn(BATCHES[1], 1)
    assert again["skipped"] == 0, "the next one is made as if nothing had been"
    moved = state()
    assert any(not torch.equal(before[name], moved[name]) for name in before)


def spoiled(
    directory: Path, monkeypatch: pytest.MonkeyPatch, value: float | None, **keys: Any
) -> tuple[dict[str, Tensor], Row]:
    """Weights after a batch whose first learned token is an outlier, or has this logprob."""
    trainer = Trainer(directory, optimizer="sgd", betas=[0.0, 0.9], **keys)
    learner, score = trainer.learner, trainer.learner.score

    def one(micro: MicroBatch, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        logprobs, entropy = score(micro, *args, **kwargs)
        return torch.where(micro.source == 0, value or 0.0, logprobs), entropy

    if value is not None:
        monkeypatch.setattr(learner, "score", one)
    row = trainer.learn(improbable(BATCHES[0], int(value is None), 1), 0)
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}, row


@pytest.mark.parametrize(
    "objective", ["ppo", "decoupled", "gspo", "geometric", "tis_opsm", "cispo"]
)
def test_an_outlier_is_left_out_alone_or_with_its_sequence(
    directory: Path, monkeypatch: pytest.MonkeyPatch, objective: str
) -> None:
    """Compare updates with outliers of every kind: the outlier has no part, all other tokens do."""
    keys: dict[str, Any] = {"objective": objective, "kl_coef": 0.0, "minibatches": 2}
    if objective == "geometric":
        keys |= {"objective": "tis", "mask": objective, "mask_low": 0.1, "mask_high": 10.0}
    weights, row = spoiled(directory, monkeypatch, None, **keys)
    sequence = objective in ("gspo", "geometric", "tis_opsm")
    assert row["outliers"] == (sum(BATCHES[0][0].loss_mask) if sequence else 1)
    assert row["skipped"] == 0
    start = dict(Trainer(directory).learner.model.named_parameters())
    assert any(not torch.equal(weights[name], start[name]) for name in start)
    for value in (torch.nan, torch.inf, -torch.inf):
        with monkeypatch.context() as patch:
            again, other = spoiled(directory, patch, value, **keys)
        assert other["outliers"] == row["outliers"]
        assert other["skipped"] == 0
        assert other["loss"] == pytest.approx(row["loss"])
        for name, tensor in weights.items():
            torch.testing.assert_close(again[name], tensor)


def test_the_bound_can_be_moved_and_taken_away() -> None:
    pieces, ranks = ObjectiveSpec(), Ranks()
    behaviour = torch.tensor([-3.0, -9.0])
    one = Sequences(torch.zeros(2, dtype=torch.int64), 1)
    for bound, found in ((100.0, [False, True]), (1000.0, [False] * 2), (0.0, [False] * 2)):
        guard = Guard(bound, pieces, ranks)
        out = guard.outliers(torch.tensor([-3.0, -3.0]), behaviour, one)
        assert out.tolist() == found, "e^6 = 403"
        guard.see(torch.tensor(1.0), out)
        assert guard.verdict() == "", "one is left"
    whole = Guard(100.0, ObjectiveSpec(ratio_level="sequence"), ranks)
    out = whole.outliers(torch.tensor([-3.0, -3.0]), behaviour, one)
    assert out.tolist() == [True, True]
    whole.see(torch.tensor(0.0), out)
    assert whole.verdict() == "outliers", "nothing is left"


def row(skipped: float | None, reason: str = "gradient") -> Row:
    shares: Row = {f"skipped/{name}": skipped if name == reason else 0.0 for name in REASONS}
    return {"skipped": skipped, **shares}


def test_patience_ends_with_a_sentence() -> None:
    patience = SkipLimit(3)
    assert patience.see(row(1.0), 1) == "its gradient is not finite"
    assert patience.see(row(1.0, "loss"), 2) == "its loss is not finite"
    assert patience.see(row(0.0), 3) == ""
    assert patience.see(row(None), 4) == "", "nothing to update"
    assert patience.see(row(0.5), 5) == "its gradient is not finite", "a part of the minibatches"
    patience.see(row(1.0), 6)
    patience.see(row(1.0), 7)
    with pytest.raises(DivergedError, match=r"stopped at step 8: .* last 3 batches .* of step 5"):
        patience.see(row(1.0), 8)


def judge(*parts: list[float], every: int = 5) -> Compared | None:
    """The verdict on one generator, by k3 of its tokens in several batches."""
    verdicts, found = Verdicts(every), None
    for step, values in enumerate(parts):
        assert verdicts.due("a", step), "it was not judged"
        assert found is None
        found = verdicts.add(
            "a", step, torch.tensor(values, dtype=torch.float64), f"the worst of batch {step}"
        )
    return found


@pytest.mark.parametrize(
    ("parts", "figure", "where"),
    [
        ([[1e-9] * 99 + [math.inf]], 1e-9, 0),  # one token alone decides nothing
        ([[1e-9] * 50 + [9.0], [1e-9] * 99 + [50.0]], 1 / 150, 1),  # two do, each by 1
        ([[0.3] * 1000], 0.3, 0),
        ([[math.inf] * 100], 1.0, 0),
        ([[0.5] * (MIN_TOKENS - 1), [0.5]], 0.5, 0),  # few tokens wait for more
    ],
)
def test_the_figure_of_a_generator(parts: list[list[float]], figure: float, where: int) -> None:
    found = judge(*parts)
    assert found is not None
    assert found.mismatch == pytest.approx(figure, rel=1e-3)
    assert found.tokens == sum(map(len, parts))
    assert found.where == f"the worst of batch {where}"


def test_who_was_judged_is_due_again_after_some_steps() -> None:
    verdicts, enough = Verdicts(every=5), torch.zeros(MIN_TOKENS)
    assert verdicts.due("a", 3)
    assert verdicts.add("a", 3, enough, "") is not None
    assert [verdicts.due("a", step) for step in (4, 7, 8, 9)] == [False, False, True, True]
    assert verdicts.add("a", 8, enough[:1], "") is None, "the count restarts"
    assert verdicts.due("b", 4), "one that comes later is due at once"
    assert judge([0.5] * (MIN_TOKENS - 1)) is None
    assert Compared(0, tokens=1, total=1.0, worst=math.inf).mismatch == 0.0, "of one token none"
    assert not Verdicts(every=0).due("a", 0)


def test_nothing_known_for_long_is_told_once() -> None:
    verdicts = Verdicts(every=5)
    for step in range(40):
        verdicts.due("a", step)
        told = verdicts.unknown(["a"], step)
        assert told == (["a"] if step == 15 else []), step
    verdicts.add("a", 40, torch.zeros(64), "")
    assert [s for s in range(41, 80) if verdicts.unknown(["a"], s)] == [55]


VLLM = "generator.engine=vllm"


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cpu", [], "float32"),
        ("cpu", ["trainer.precision=bf16"], "bfloat16"),
        ("cpu", ["weight_hub.dtype=float16"], "float16"),
        ("cpu", [VLLM, 'generator.engine_args={quantization = "fp8"}'], "fp8"),
        ("cpu", [VLLM, 'generator.engine_args={kv_cache_dtype = "fp8_e4m3"}'], "fp8"),
        ("cuda", [], "bfloat16"),  # as `auto` stands for there
        ("cuda", ["weight_hub.dtype=float32"], "bfloat16"),
        ("cuda", ["trainer.precision=no", "weight_hub.dtype=float32"], "float32"),
    ],
)
def test_a_bound_fits_the_coarsest_format(device: str, settings: list[str], expected: str) -> None:
    for bound in (0.0, 0.5):
        more = ["model.path=m", f"trainer.max_mismatch={bound}"]
        config = load_config(overrides=[*settings, *more], environ={})
        assert bound_of(config, device) == (bound or BOUNDS[expected], expected)
