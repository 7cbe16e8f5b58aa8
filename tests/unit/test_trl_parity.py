"""The same batch, model and hyper-parameters give TRL's loss and gradients.

Umbra's side is a whole `PolicyUpdate`: advantages, packed rows, aggregation by counts. TRL's is
`GRPOTrainer._compute_loss` on the padded batch. Advantages are Umbra's on both sides (TRL's epsilon
of the deviation is another), and so are the importance weights that TRL would get from vLLM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.closeness import assert_same_sums, same_sum
from fakes.noisy_batch import TEMPERATURE, Recorder, noisy_trajectories
from torch import Tensor

from umbra.proto.records import Trajectory
from umbra.services.runtime.config import RunConfig
from umbra.services.runtime.config_loader import load_config
from umbra.services.trainer.advantages import token_advantages
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.rewards import rewarded
from umbra.services.trainer.update import PolicyUpdate

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL and its friends

TERMS = 300  # two layers, forward and backward, of 64 units at most, and a small vocabulary
LIMIT = 8  # tokens of a response at most
IS = "vllm_importance_sampling_correction"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    make_model(path, hidden=32, ff=64)
    return path


def settings(directory: Path, **keys: Any) -> RunConfig:
    common = {"threads": 1, "device": "cpu", "response_limit": LIMIT}
    overrides = [f"trainer.{key}={value}" for key, value in (common | keys).items()]
    stages = 'buffer.stages=["ref_logp", "logp"]'
    return load_config(overrides=[*overrides, stages, f"model.path={directory}"], environ={})


def umbra_side(
    directory: Path, trajectories: list[Trajectory], **keys: Any
) -> tuple[float, dict[str, Tensor]]:
    config = settings(directory, **keys)
    learner = Recorder(load_policy(directory)[0], config.trainer, steps=1)
    batch = make_batch(trajectories, learner.model.config.vocab_size)
    row = PolicyUpdate(config, learner)(batch, 3, lambda: True)
    assert row is not None
    assert row["loss"] is not None
    return row["loss"], learner.gradients


def padded(rows: list[Any], *, left: bool = False) -> Tensor:
    width = max(map(len, rows))
    table = torch.zeros(len(rows), width, dtype=torch.from_numpy(rows[0]).dtype)
    for line, row in zip(table, rows, strict=True):
        line[width - len(row) :] if left else line[: len(row)]
        place = slice(width - len(row), width) if left else slice(0, len(row))
        line[place] = torch.from_numpy(row)
    return table


def trl_inputs(
    directory: Path, trajectories: list[Trajectory], old: str, **keys: Any
) -> dict[str, Tensor]:
    """The batch as TRL wants it, with Umbra's advantages."""
    config = settings(directory, **keys)
    batch = make_batch(trajectories, vocab_size=1000)
    earned = rewarded(batch, config.trainer.pieces, LIMIT, None, None)
    advantages, _ = token_advantages(earned, config.trainer.pieces)
    first = torch.searchsorted(batch.tokens.owner, torch.arange(len(trajectories)))

    def floats(field: str) -> Tensor:
        return padded([np.frombuffer(getattr(t, field), "<f4").copy() for t in trajectories])

    def tokens(field: str, *, left: bool) -> tuple[Tensor, Tensor]:
        rows = [np.frombuffer(getattr(t, field), "<i4").astype(np.int64) for t in trajectories]
        return padded(rows, left=left), padded([np.ones_like(row) for row in rows], left=left)

    prompts, prompt_mask = tokens("prompt_ids", left=True)
    responses, mask = tokens("response_ids", left=False)
    if config.trainer.pieces.overlong_filter:
        mask[torch.tensor([t.finish_reason == "length" for t in trajectories])] = 0
    return {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask,
        "completion_ids": responses,
        "completion_mask": mask,
        "advantages": advantages[first],
        "old_per_token_logps": floats(old),
        "ref_per_token_logps": floats("ref_logprobs"),
        "sampling_per_token_logps": floats("logprobs"),
        "num_items_in_batch": mask.sum(),
    }


def trl_side(
    directory: Path, tmp_path: Path, inputs: dict[str, Tensor], **args: Any
) -> tuple[float, dict[str, Tensor]]:
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    model, tokenizer = load_policy(directory)
    with_vllm = args.pop(IS, False)
    config = GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=LIMIT,
        temperature=TEMPERATURE,
        gradient_checkpointing=False,
        **args,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1", "2", "3", "4"]}),
        processing_class=tokenizer,
    )
    if with_vllm:  # the weights are in `inputs`; no vLLM is started
        trainer.use_vllm = True
        trainer.vllm_importance_sampling_correction = True
    model.eval()  # neither dropout nor a share of an accumulation
    loss = trainer._compute_loss(model, inputs)  # pyright: ignore[reportPrivateUsage]
    loss.backward()
    named = model.named_parameters()
    return float(loss.detach()), {n: p.grad.clone() for n, p in named if p.grad is not None}


def weights(inputs: dict[str, Tensor], level: str, mode: str, low: float, high: float) -> Tensor:
    """TRL's importance weights, as documented for vllm_importance_sampling_mode."""
    difference = inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]
    difference = difference * inputs["completion_mask"]
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    found = difference.exp()
    if mode == "truncate":
        return found.clamp(low, high)
    return found.masked_fill((found < low) | (found > high), 0.0)


SEQUENCE = {"importance_sampling_level": "sequence"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"objective": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"objective": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "dapo": ({"objective": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo": ({"objective": "ppo", "denominator": "all"}, {"loss_type": "bnpo"}),
    "gspo": (
        {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.08},
        {"loss_type": "grpo", "epsilon": 0.05, "epsilon_high": 0.08, **SEQUENCE},
    ),
    "luspo": (
        {"objective": "gspo", "clip_low": 0.05, "clip_high": 0.05, "aggregation": "sequence_sum"},
        {"loss_type": "luspo", "epsilon": 0.05, **SEQUENCE},
    ),
    "cispo": (
        {"objective": "cispo", "clip_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "sapo": ({"objective": "sapo"}, {"loss_type": "sapo"}),
    "delta": (
        {"objective": "grpo", "dual_clip": 1.3},
        {"loss_type": "grpo", "delta": 1.3},
    ),
    "kl": (
        {"objective": "grpo", "kl_coef": 0.3},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "unbiased kl": (
        {"objective": "dapo", "clip_high": 0.2, "kl_coef": 0.3, "kl_unbiased": "true"},
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "opsm": (
        {"objective": "grpo", "mask": "opsm", "mask_threshold": 0.02},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.02},
    ),
    "entropy": (
        {"objective": "ppo", "denominator": "all", "entropy_coef": 0.1},
        {"loss_type": "bnpo", "entropy_coef": 0.1},
    ),
    "overlong filter": (
        {"objective": "dapo", "clip_high": 0.2, "overlong_filter": "true"},
        {"loss_type": "dapo"},
    ),
}


def assert_same(
    ours: tuple[float, dict[str, Tensor]], theirs: tuple[float, dict[str, Tensor]]
) -> None:
    assert ours[0] == same_sum(theirs[0], terms=TERMS, scale=1.0)
    assert ours[1].keys() == theirs[1].keys()
    assert max(float(g.abs().max()) for g in ours[1].values()) > 1e-3
    for name, gradient in ours[1].items():
        assert_same_sums(gradient, theirs[1][name], terms=TERMS, what=name)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_trls(name: str, directory: Path, tmp_path: Path) -> None:
    keys, args = CASES[name]
    trajectories = noisy_trajectories(load_policy(directory)[0])
    inputs = trl_inputs(directory, trajectories, "logprobs", **keys)
    assert_same(
        umbra_side(directory, trajectories, **keys),
        trl_side(directory, tmp_path, inputs, **args),
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_importance_sampling_is_trls(
    level: str, mode: str, directory: Path, tmp_path: Path
) -> None:
    low, high = 0.8, 1.3
    keys = {
        "objective": "tis",
        "correction": mode,
        "is_level": level,
        "is_floor": low,
        "is_cap": high,
        "proximal": "stage",
        "aggregation": "sequence_mean",
        "denominator": "all",
    }
    trajectories = noisy_trajectories(load_policy(directory)[0])
    inputs = trl_inputs(directory, trajectories, "proximal_logprobs", **keys)
    found = weights(inputs, level, mode, low, high)
    assert len(found.unique()) > 3
    assert_same(
        umbra_side(directory, trajectories, **keys),
        trl_side(
            directory,
            tmp_path,
            inputs | {"importance_sampling_ratio": found},
            **{"loss_type": "grpo", IS: True},
        ),
    )
