"""`umbra.compat.trl`: what TRL's arguments become, and what is refused by name."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from trl.trainer.grpo_config import GRPOConfig

from umbra.compat.trl import DEFAULTS, OURS_TO_DECIDE, GRPOTrainer, sections_of, values_of
from umbra.proto.errors import UsageError
from umbra.services.config.loader import config_of
from umbra.services.config.rules import check_feasible

ROWS = [{"prompt": "2 + 2 ="}] * 20


def config(tmp_path: Path, **changes: Any) -> GRPOConfig:
    return GRPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, **changes)


def sections(tmp_path: Path, rows: int = 100, **changes: Any) -> dict[str, dict[str, Any]]:
    return sections_of(values_of(config(tmp_path, **changes)), rows=rows)


def test_the_defaults_are_those_of_trl() -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    assert {name: theirs[name] for name in DEFAULTS} == DEFAULTS
    assert OURS_TO_DECIDE <= set(theirs)
    assert not OURS_TO_DECIDE & set(DEFAULTS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "grpo", "beta": 0.04},
        {"loss_type": "dr_grpo", "scale_rewards": False},
        {"loss_type": "cispo", "epsilon_high": 5.0},
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"num_iterations": 2, "steps_per_generation": 4, "delta": 4.0},
        {"mask_truncated_completions": True, "entropy_coef": 0.01},
    ],
)
def test_what_is_taken_is_a_configuration_that_works(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    made = sections(tmp_path, **changes)
    made["model"] = {"path": "m"}
    made["data"]["prompts"] = "p.jsonl"
    check_feasible(config_of(made, "GRPOConfig"))


def test_the_objective_is_that_of_the_loss_type(tmp_path: Path) -> None:
    def pieces(**changes: Any) -> Any:
        made = sections(tmp_path, **changes)
        return config_of({"trainer": made["trainer"]}, "GRPOConfig").trainer.pieces

    dapo = pieces(epsilon_high=0.28)
    assert (dapo.clip_low, dapo.clip_high, dapo.aggregation) == (0.2, 0.28, "token_mean")
    assert (dapo.advantage, dapo.denominator, dapo.kl_coef) == ("grpo", "all", 0.0)
    cispo = pieces(loss_type="cispo", epsilon_high=5.0)
    assert (cispo.clip, cispo.clip_high) == ("cispo", 4.0)
    whole = pieces(importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
    assert (whole.ratio_level, whole.clip, whole.clip_high) == ("sequence", "ppo", 4e-4)
    with pytest.raises(UsageError, match="cispo needs importance_sampling_level"):
        pieces(loss_type="cispo", importance_sampling_level="sequence")
    unscaled = pieces(loss_type="dr_grpo", scale_rewards="none")
    assert (unscaled.advantage, unscaled.aggregation) == ("dr_grpo", "constant")
    penalised = pieces(beta=0.04)
    assert (penalised.kl_coef, penalised.kl_unbiased) == (0.04, True)
    assert sections(tmp_path, beta=0.04)["buffer"]["stages"] == ["ref_logp"]


def test_batches_and_steps_are_counted_as_trl_counts_them(tmp_path: Path) -> None:
    made = sections(tmp_path, per_device_train_batch_size=16, gradient_accumulation_steps=2)
    assert made["buffer"]["batch_groups"] == 4  # 32 completions of an update, 8 of a prompt
    assert made["run"]["steps"] == math.ceil(3 * 100 / 4)
    made = sections(tmp_path, per_device_train_batch_size=16, steps_per_generation=2, max_steps=9)
    assert (made["buffer"]["batch_groups"], made["trainer"]["minibatches"]) == (4, 2)
    assert made["run"]["steps"] == 5  # batches of two updates each
    made = sections(tmp_path, num_iterations=3, max_steps=9)
    assert (made["run"]["steps"], made["trainer"]["epochs"]) == (3, 3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss_type": "bnpo"}, "loss_type = 'bnpo' has no counterpart"),
        ({"scale_rewards": "batch"}, "scale_rewards = 'batch' has no counterpart"),
        ({"optim": "adafactor"}, "optim = 'adafactor'"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile = 0.2"),
        ({"repetition_penalty": 1.2}, "repetition_penalty = 1.2"),
        ({"sync_ref_model": True, "beta": 0.1}, "sync_ref_model = True"),
        ({"adam_epsilon": 1e-6}, "adam_epsilon = 1e-06"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor = 0.1"),
        ({"eval_strategy": "epoch"}, "eval_strategy = 'epoch' has no counterpart"),
    ],
)
def test_what_means_something_else_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        sections(tmp_path, **changes)


def test_arguments_of_the_trainer_are_refused_by_name(tmp_path: Path) -> None:
    def score(prompts: list[str], completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    good: dict[str, Any] = {"model": "m", "reward_funcs": score, "train_dataset": ROWS}
    GRPOTrainer(**good, optimizers=(None, None), callbacks=None)
    with pytest.raises(UsageError, match="callbacks means nothing here yet"):
        GRPOTrainer(**good, callbacks=[object()])
    with pytest.raises(UsageError, match="model is a object: give its directory"):
        GRPOTrainer(**{**good, "model": object()})
    with pytest.raises(UsageError, match="train_dataset is missing"):
        GRPOTrainer("m", score)
    with pytest.raises(UsageError, match="processing_class is that of 'other'"):
        GRPOTrainer(**good, processing_class=type("T", (), {"name_or_path": "other"})())
    with pytest.raises(UsageError, match="train\\(\\) comes before save_model"):
        GRPOTrainer(**good).save_model(tmp_path)
