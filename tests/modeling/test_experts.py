"""Experts: how they are computed, what they are called outside, how evenly they are used."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.policy_rollouts import config
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from umbra.proto.errors import UsageError
from umbra.services.modeling.micro_batch import MicroBatch, Tokens
from umbra.services.modeling.packing import pack
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.metrics import expert_metrics
from umbra.services.trainer.policy import export_policy, load_policy

# As published checkpoints have them, in layer 1; "{e}" stands for the number of an expert.
NAMES = {
    "qwen3-moe": "mlp.experts.{e}.gate_proj.weight mlp.experts.{e}.down_proj.weight",
    "qwen2-moe": "mlp.experts.{e}.up_proj.weight mlp.shared_expert.up_proj.weight",
    "mixtral": "block_sparse_moe.experts.{e}.w1.weight block_sparse_moe.experts.{e}.w2.weight "
    "block_sparse_moe.experts.{e}.w3.weight block_sparse_moe.gate.weight",
    "deepseek-v3": "mlp.experts.{e}.up_proj.weight mlp.gate.weight",
    "glm4-moe": "mlp.experts.{e}.up_proj.weight mlp.gate.e_score_correction_bias",
    "gpt-oss": "mlp.experts.gate_up_proj mlp.router.weight",
    "olmoe": "mlp.experts.{e}.gate_proj.weight mlp.gate.weight",
}


@pytest.mark.parametrize("name", NAMES)
def test_an_export_has_the_names_of_published_checkpoints(name: str, tmp_path: Path) -> None:
    directory = ARCHITECTURES[name].write(tmp_path / "model")
    model, tokenizer = load_policy(directory)
    learner = Learner(model, config(directory).trainer, 2)
    out = export_policy(learner.model, tokenizer, tmp_path / "out", learner.weights())
    before, after = (load_file(path / "model.safetensors") for path in (directory, out))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor), key
    config_of: Any = model.config
    experts = getattr(config_of, "num_local_experts", None) or config_of.num_experts
    wanted = {one.format(e=e) for one in NAMES[name].split() for e in range(experts)}
    assert {f"model.layers.1.{one}" for one in wanted} <= after.keys()


def test_load_by_hand() -> None:
    load = torch.tensor([[4.0, 4.0, 4.0, 4.0], [12.0, 4.0, 0.0, 0.0]])
    row = expert_metrics(load, torch.tensor([1.0, 3.0]))
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert row == {
        "experts/load/mean": pytest.approx((1 + 3) / 2),
        "experts/load/max": pytest.approx(3),
        "experts/entropy/mean": pytest.approx((1 + entropy) / 2),
        "experts/entropy/min": pytest.approx(entropy),
        "experts/dead": pytest.approx(0.25),
        "experts/rerouted": pytest.approx(4 / 32),
    }
    nothing = expert_metrics(torch.zeros(2, 4), torch.zeros(2))
    assert set(nothing) == set(row) and set(nothing.values()) == {None}


def one_sequence() -> MicroBatch:
    ids = torch.tensor([5, 6, 7, 8, 9, 10])
    one = Tokens(ids, torch.tensor([6]), torch.arange(1, 6), torch.zeros(5, dtype=torch.int64))
    (micro,) = pack(one, pack_tokens=8, micro_tokens=8)
    return micro


@pytest.mark.parametrize("recompute", ["false", "true", "selective"])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "olmoe"])
def test_the_balance_loss_is_that_of_transformers(
    name: str, recompute: str, tmp_path: Path
) -> None:
    """Of one layer; Transformers takes the means over all layers together."""
    micro = one_sequence()
    found: list[dict[str, Tensor]] = []
    for coefficient in (0.0, 3.0):
        settings = {"router_aux_loss_coef": coefficient, "activation_checkpointing": recompute}
        learner = Learner(one_layer(name), config(tmp_path, **settings).trainer, 2)
        balance = learner.balance([micro])
        logprobs, _ = learner.score(micro, torch.ones(5), balance=balance)
        learner.backward(logprobs.sum())
        found.append({n: p.grad for n, p in learner.model.named_parameters() if p.grad is not None})
    model = one_layer(name)
    (3.0 * model(torch.tensor([[5, 6, 7, 8, 9]]), output_router_logits=True).aux_loss).backward()
    largest = 0.0
    for parameter, tensor in model.named_parameters():
        ours = found[1][parameter] - found[0][parameter]
        theirs = torch.zeros_like(ours) if tensor.grad is None else tensor.grad
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-3)
        largest = max(largest, float(theirs.abs().max()))
    assert largest > 1e-3


def test_micro_batches_share_one_balance_loss(tmp_path: Path) -> None:
    """Equal ones: the same gradient, however many there are; padding has no part in it."""
    micro = one_sequence()
    learner = Learner(one_layer("qwen3-moe"), config(tmp_path, router_aux_loss_coef=1.0).trainer, 2)
    padded = replace(
        micro,
        input_ids=torch.cat([micro.input_ids, torch.full((1, 3), 50)], 1),
        position_ids=torch.arange(8)[None],
        fed=torch.tensor([[True] * 5 + [False] * 3]),
    )
    gradients: list[Tensor] = []
    for micros in ([micro], [micro, micro], [padded]):
        balance = learner.balance(micros)
        for part in micros:
            logprobs, _ = learner.score(part, torch.ones(5), balance=balance)
            learner.backward(0.0 * logprobs.sum())
        router = learner.model.model.layers[0].mlp.gate.weight
        gradients.append(router.grad.clone())
        learner.model.zero_grad()
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-6, rtol=1e-4)
    assert gradients[0].abs().max() > 1e-4


def test_a_model_that_balances_by_a_bias_has_no_such_loss(tmp_path: Path) -> None:
    for name in ("deepseek-v3", "qwen3"):
        with pytest.raises(UsageError, match="router_aux_loss_coef: Transformers knows no such"):
            settings = config(tmp_path, router_aux_loss_coef=0.1).trainer
            Learner(ARCHITECTURES[name].model(), settings, 2)


def one_layer(name: str) -> Any:
    """A model of the architecture `name` with a single layer, the same at each call."""
    torch.manual_seed(3)
    made: Any = ARCHITECTURES[name].config(layers=1)
    return AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
