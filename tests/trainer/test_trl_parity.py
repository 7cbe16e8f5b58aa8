"""The same batch, model and hyper-parameters give TRL's loss and gradients.

Umbra's side is a whole `PolicyUpdate`: advantages, packed rows, aggregation by counts. TRL's is
`GRPOTrainer._generate_and_score_completions`, whose generation is replaced by the same responses,
and `_compute_loss`: padding, masks of tool answers and of truncated responses, importance weights
and their truncation are TRL's own code. So are advantages that are not scaled; of scaled ones TRL's
epsilon is another, so that Umbra's are used. What the two models before the update say of the
tokens (old, reference) is in the batch, and not computed by TRL.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.closeness import assert_same_sums, same_sum
from fakes.noisy_batch import TEMPERATURE, noisy_trajectories, settings, update
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from umbra.proto.records import Trajectory, pack_float32, unpack_float32, unpack_int32
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.objectives.advantages import batch_advantages
from umbra.services.trainer.policy import load_policy

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL and its friends

TERMS = 300  # two layers, forward and backward, of 64 units at most, and a small vocabulary
LIMIT = 8  # tokens of a response at most


STAGES = ("ref_logp", "logp")


def umbra_side(
    directory: Path, trajectories: list[Trajectory], **keys: Any
) -> tuple[float, dict[str, Tensor]]:
    gradients, row = update(directory, trajectories, *STAGES, **keys)
    assert row["loss"] is not None
    return row["loss"], gradients


def padded(trajectories: list[Trajectory], field: str) -> Tensor:
    rows = [torch.tensor(unpack_float32(getattr(t, field))) for t in trajectories]
    return pad_sequence(rows, batch_first=True)


def trl_trainer(
    directory: Path, tmp_path: Path, trajectories: list[Trajectory], **args: Any
) -> Any:
    """TRL's trainer, which generates `trajectories`, whatever the prompts."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    model, tokenizer = load_policy(directory)
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
    trainer: Any = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [t.reward for t in trajectories],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1", "2", "3", "4"]}),
        processing_class=tokenizer,
    )
    masks = [list(t.loss_mask) for t in trajectories]
    tools = masks if any(0 in mask for mask in masks) else None

    def generate(prompts: list[str]) -> tuple[Any, ...]:
        return (
            [unpack_int32(t.prompt_ids) for t in trajectories],
            [unpack_int32(t.response_ids) for t in trajectories],
            tools,
            [""] * len(prompts),
            [unpack_float32(t.logprobs) for t in trajectories],
            {},
            None,
            None,
        )

    trainer._generate = generate
    return trainer


def trl_side(
    directory: Path, trainer: Any, trajectories: list[Trajectory], old: str, **keys: Any
) -> tuple[float, dict[str, Tensor], dict[str, Any]]:
    """Loss, gradients, and the batch as TRL has made it of the trajectories."""
    olds = {"old_per_token_logps": padded(trajectories, old)}
    with pytest.MonkeyPatch.context() as patch:  # the policy before the update is not at hand
        before = (olds["old_per_token_logps"], None, None)
        patch.setattr(trainer, "_get_per_token_logps_and_entropies", lambda *_, **__: before)
        patch.setattr(trainer, "beta", 0.0)
        inputs = trainer._generate_and_score_completions([{"prompt": "1"}] * len(trajectories))
    inputs |= olds | {"ref_per_token_logps": padded(trajectories, "ref_logprobs")}
    if trainer.scale_rewards != "none":
        inputs["advantages"] = our_advantages(directory, trajectories, **keys)
    model = trainer.model
    model.eval()  # neither dropout nor a share of an accumulation
    loss = trainer._compute_loss(model, inputs)
    loss.backward()
    named = model.named_parameters()
    gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
    return float(loss.detach()), gradients, inputs


def our_advantages(directory: Path, trajectories: list[Trajectory], **keys: Any) -> Tensor:
    config = settings(directory, *STAGES, **keys)
    batch = make_batch(trajectories, vocab_size=1000)
    advantages, _ = batch_advantages(batch, config.trainer.pieces, None, None)
    first = torch.searchsorted(batch.tokens.owner, torch.arange(len(trajectories)))
    return advantages[first]


def interrupted(trajectories: list[Trajectory]) -> list[Trajectory]:
    """The second token of every response that has three is an environment's."""

    def told(trajectory: Trajectory) -> Trajectory:
        if trajectory.response_tokens < 3:
            return trajectory
        mask = bytearray(trajectory.loss_mask)
        mask[1] = 0
        logprobs = unpack_float32(trajectory.logprobs)
        logprobs[1] = 0.0
        return msgspec.structs.replace(
            trajectory, loss_mask=bytes(mask), logprobs=pack_float32(logprobs), support=None
        )

    return [told(trajectory) for trajectory in trajectories]


SEQUENCE = {"importance_sampling_level": "sequence"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"objective": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"objective": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
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
    "delta": ({"objective": "grpo", "dual_clip": 1.3}, {"loss_type": "grpo", "delta": 1.3}),
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
        {"loss_type": "dapo", "mask_truncated_completions": True},
    ),
}


def assert_same(
    ours: tuple[float, dict[str, Tensor]], theirs: tuple[float, dict[str, Tensor], dict[str, Any]]
) -> None:
    assert ours[0] == same_sum(theirs[0], terms=TERMS, scale=1.0)
    assert ours[1].keys() == theirs[1].keys()
    assert max(float(g.abs().max()) for g in ours[1].values()) > 1e-3
    for name, gradient in ours[1].items():
        assert_same_sums(gradient, theirs[1][name], terms=TERMS, what=name)


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        *((name, False) for name in CASES),
        *((name, True) for name in ("grpo", "dapo", "gspo", "opsm", "overlong filter")),
    ],
)
def test_loss_and_gradients_are_trls(
    name: str, environment: bool, directory: Path, tmp_path: Path
) -> None:
    keys, args = CASES[name]
    trajectories = noisy_trajectories(load_policy(directory)[0])
    if environment:
        trajectories = interrupted(trajectories)
    trainer = trl_trainer(directory, tmp_path, trajectories, **args)
    theirs = trl_side(directory, trainer, trajectories, "logprobs", **keys)
    assert_same(umbra_side(directory, trajectories, **keys), theirs)
    assert ("tool_mask" in theirs[2]) == environment
    trained = theirs[2]["completion_mask"].any(-1).tolist()
    cut = [t.finish_reason == "length" for t in trajectories]
    assert any(cut)
    assert trained == [not (c and name == "overlong filter") for c in cut]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("environment", [False, True])
def test_importance_sampling_is_trls(
    level: str, mode: str, environment: bool, directory: Path, tmp_path: Path
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
    if environment:
        trajectories = interrupted(trajectories)
    trainer = trl_trainer(directory, tmp_path, trajectories, loss_type="grpo")
    trainer.use_vllm = True  # none is started: its logprobs are in the trajectories
    trainer.vllm_importance_sampling_correction = True
    trainer.vllm_importance_sampling_mode = f"{level}_{mode}"
    trainer.vllm_importance_sampling_clip_min = low
    trainer.vllm_importance_sampling_clip_max = high
    theirs = trl_side(directory, trainer, trajectories, "proximal_logprobs", **keys)
    found = theirs[2]["importance_sampling_ratio"]
    assert len(found.unique()) > 3
    assert float(found.min()) == pytest.approx(low if mode == "truncate" else 0.0)
    assert float(found.max()) < 1.001 * high
    assert_same(umbra_side(directory, trajectories, **keys), theirs)
