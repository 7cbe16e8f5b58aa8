"""The same batch, model and hyper-parameters give TRL's loss and gradients.

Umbra's side is a whole `PolicyUpdate`: advantages, packed rows, aggregation by counts. TRL's is
`GRPOTrainer._generate_and_score_completions`, whose generation is replaced by the same responses,
and `_compute_loss`: padding, masks of tool answers and of truncated responses are TRL's own code.
So are advantages that are not scaled; of scaled ones TRL's epsilon is another, so that Umbra's are
used. What the two models before the update say of the tokens (old, reference) is in the batch, and
not computed by TRL.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.closeness import assert_same_sums, same_sum
from fakes.rank_bench import TEMPERATURE, noisy_trajectories, update
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from umbra.proto.records import Trajectory, pack_float32, unpack_float32, unpack_int32
from umbra.services.config import TrainerConfig
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.objectives.advantages import batch_advantages
from umbra.services.trainer.policy import load_policy

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of TRL and its friends

TERMS = 300  # two layers, forward and backward, of 64 units at most, and a small vocabulary
LIMIT = 8  # tokens of a response at most


def padded(trajectories: list[Trajectory], field: str) -> Tensor:
    rows = [torch.tensor(unpack_float32(getattr(t, field))) for t in trajectories]
    return pad_sequence(rows, batch_first=True)


def trl_side(
    directory: Path, out: Path, trajectories: list[Trajectory], args: dict[str, Any], **keys: Any
) -> tuple[float, dict[str, Tensor], dict[str, Any]]:
    """TRL's loss, gradients, and the batch that it has made of the trajectories for any prompts."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    model, tokenizer = load_policy(directory)
    trainer: Any = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [t.reward for t in trajectories],
        args=GRPOConfig(
            output_dir=str(out),
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=LIMIT,
            temperature=TEMPERATURE,
            gradient_checkpointing=False,
            **args,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["1", "2", "3", "4"]}),
        processing_class=tokenizer,
    )
    masks = [list(t.loss_mask) for t in trajectories]
    prompts, responses = (
        [unpack_int32(getattr(t, f"{name}_ids")) for t in trajectories]
        for name in ("prompt", "response")
    )
    tools = masks if any(0 in mask for mask in masks) else None
    logprobs = [unpack_float32(t.logprobs) for t in trajectories]
    made = prompts, responses, tools, [""] * len(prompts), logprobs, {}, None, None
    # The policy before the update is not at hand.
    old = padded(trajectories, "logprobs")
    doubles = {
        "_generate": lambda _: made,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (old, None, None),
        "beta": 0.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, double in doubles.items():
            patch.setattr(trainer, name, double)
        inputs = trainer._generate_and_score_completions([{"prompt": "1"}] * len(trajectories))
    inputs["old_per_token_logps"] = old
    inputs["ref_per_token_logps"] = padded(trajectories, "ref_logprobs")
    if trainer.scale_rewards != "none":
        batch, pieces = make_batch(trajectories, vocab_size=1000), TrainerConfig(**keys).pieces
        first = torch.searchsorted(batch.tokens.owner, torch.arange(len(trajectories)))
        inputs["advantages"] = batch_advantages(batch, pieces, None, None)[0][first]
    trainer.model.eval()  # neither dropout nor a share of an accumulation
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    named = trainer.model.named_parameters()
    gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
    return float(loss.detach()), gradients, inputs


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
    "kl": (
        {"objective": "grpo", "kl_coef": 0.3},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False},
    ),
    "unbiased kl": (
        {"objective": "dapo", "clip_high": 0.2, "kl_coef": 0.3, "kl_unbiased": True},
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "opsm": (
        {"objective": "grpo", "mask": "opsm", "mask_threshold": 0.02},
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.02},
    ),
    "overlong filter": (
        {"objective": "dapo", "clip_high": 0.2, "overlong_filter": True},
        {"loss_type": "dapo", "mask_truncated_completions": True},
    ),
}


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
    loss, gradients, batch = trl_side(directory, tmp_path, trajectories, args, **keys)
    found, row = update(directory, trajectories, "ref_logp", **keys)
    assert row["loss"] == same_sum(loss, terms=TERMS, scale=1.0)
    assert found.keys() == gradients.keys()
    assert max(float(g.abs().max()) for g in found.values()) > 1e-3
    for key, gradient in found.items():
        assert_same_sums(gradient, gradients[key], terms=TERMS, what=key)
    assert ("tool_mask" in batch) == environment
    cut = [t.finish_reason == "length" for t in trajectories]
    assert any(cut)
    trained = batch["completion_mask"].any(-1).tolist()
    assert trained == [not (c and name == "overlong filter") for c in cut]
