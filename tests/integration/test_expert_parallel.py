"""Ranks that divide the experts of each layer (all-to-all over gloo), against one with all."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.rank_bench import Trained, make_batches
from integration import test_trainer_ranks as plain
from integration.test_sharded_loading import six_experts
from safetensors import safe_open

from umbra.proto.records import Routing, Trajectory

RANKS = 4, {"expert_parallel": 2}
CLIPPED = {"max_grad_norm": 1e-2}
CASES: dict[str, dict[str, Any]] = {
    **{name: plain.CASES[name] for name in ("offloaded", "host_optimizer", "compared")},
    "token_mean": {**plain.CASES["token_mean"], **CLIPPED},
    "critic": {**plain.CASES["critic"], **CLIPPED},
    "replay": {"router_replay": True, "share_prompts": False},
    "balance": {"router_aux_loss_coef": 0.1, "activation_checkpointing": "selective"},
    "adamw": {**plain.ADAM, "max_grad_norm": 0.1, "activation_checkpointing": True},
    "lora": {"lora_rank": 4, "learning_rate": 1.0, "lora_targets": ["q_proj", "v_proj"]},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ARCHITECTURES["qwen3-moe"].write(tmp_path_factory.mktemp("models") / "moe")


def with_routing(made: Trajectory, seed: int) -> Trajectory:
    """The same, its tokens routed to two random experts of four in each of two layers."""
    generator = torch.Generator().manual_seed(seed)
    tokens = len(made.prompt_ids) // 4 + made.response_tokens - 1
    chosen = torch.rand(tokens, 2, 4, generator=generator).argsort(-1)[..., :2].to(torch.uint8)
    routing = Routing(layers=2, choices=2, experts=4, chosen=chosen.numpy().tobytes())
    return msgspec.structs.replace(made, routing=routing)


@pytest.fixture(scope="module")
def batches() -> list[list[Trajectory]]:
    return [
        [with_routing(made, number) for number, made in enumerate(batch)]
        for batch in make_batches(2)
    ]


@pytest.mark.parametrize("case", CASES)
def test_what_is_learned_does_not_depend_on_who_has_the_experts(
    together: list[dict[str, Trained]], case: str, alone: Any
) -> None:
    found = [one[case] for one in together]
    plain.assert_as_alone(found, alone(case))
    for name, (_, elements) in found[0].local.items():
        if ".experts." in name:
            assert {one.local[name][0] for one in found} == {elements // 4}


@pytest.mark.parametrize("optimizer", [plain.MOMENTUM, plain.ADAM], ids=["momentum", "adamw"])
def test_a_checkpoint_is_the_same_whoever_has_the_experts(
    optimizer: dict[str, Any], batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    model = six_experts(tmp_path / "model")
    plain.assert_resumed(tmp_path, 4, model, batches, optimizer, saved=1, expert_parallel=2)
    names, exported = (
        safe_open(folder / "model.safetensors", framework="pt").keys()
        for folder in (model, tmp_path / "hf")
    )
    assert set(exported) == set(names), "the names of the files that it began with"


def test_ranks_that_share_rows_divide_experts(
    batches: list[list[Trajectory]], directory: Path, tmp_path: Path
) -> None:
    both = {"sequence_parallel": 2, "expert_parallel": 4}
    plain.assert_same_learned(tmp_path, 4, directory, batches, {"router_replay": True}, **both)


@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss"])
def test_architectures_with_experts_of_their_own(
    name: str, batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    model = ARCHITECTURES[name].write(tmp_path / "model")
    case = {"max_grad_norm": 0.1}
    plain.assert_same_learned(tmp_path, 2, model, batches[:1], case, expert_parallel=2)
