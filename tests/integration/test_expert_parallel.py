"""Ranks that divide the experts of each layer (all-to-all over gloo), against one with all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.rank_bench import Alone, make_batches, train
from fakes.rank_processes import TESTS, launch, see_through, start
from integration.test_trainer_ranks import assert_as_alone, with_routing
from safetensors import safe_open
from safetensors.torch import load_file

from umbra.proto.records import Trajectory
from umbra.services.trainer.checkpoints.folder import export_checkpoint
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.policy import load_policy

ADAMW = {"optimizer": "adamw", "betas": [0.9, 0.95], "learning_rate": 1e-3}
CASES: dict[str, dict[str, Any]] = {
    "token_mean": {
        "aggregation": "token_mean",
        "minibatches": 2,
        "epochs": 2,
        "objective": "decoupled",
        "max_grad_norm": 1e-2,
    },
    "replay": {"router_replay": True, "share_prompts": False},
    "balance": {"router_aux_loss_coef": 0.1, "activation_checkpointing": "selective"},
    "adamw": {**ADAMW, "max_grad_norm": 0.1, "activation_checkpointing": True},
    "offloaded": {"offload": "all", "activation_checkpointing": True, "minibatches": 2},
    "host_optimizer": {"offload": "optimizer", "minibatches": 2},
    "lora": {"lora_rank": 4, "learning_rate": 1.0, "lora_targets": ["q_proj", "v_proj"]},
    "compared": {"lag": 1, "max_mismatch": 1e9, "mismatch_every": 1, "learning_rate": 1.0},
    "critic": {
        "objective": "ppo_critic",
        "critic.learning_rate": 1e-3,
        "max_grad_norm": 1e-2,
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ARCHITECTURES["qwen3-moe"].write(tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture(scope="module")
def batches() -> list[list[Trajectory]]:
    return [
        [with_routing(made, number) for number, made in enumerate(batch)]
        for batch in make_batches(2)
    ]


@pytest.mark.parametrize(
    "together",
    [  # 2x2 is 2, twice
        pytest.param((2, {"expert_parallel": 2}), marks=pytest.mark.real, id="2"),
        pytest.param((4, {"expert_parallel": 2}), id="2x2"),
    ],
    indirect=True,
    scope="module",
)
@pytest.mark.parametrize("case", CASES)
def test_what_is_learned_does_not_depend_on_who_has_the_experts(
    together: tuple[int, Path], case: str, alone: Alone
) -> None:
    world, folder = together
    found = assert_as_alone(folder, case, world, alone[case])
    for row, expected in zip(found[0]["rows"], alone[case].rows, strict=True):
        for key in (key for key in expected if key.startswith("experts/")):
            assert row[key] == pytest.approx(expected[key]), key
    for name, (_, elements) in found[0]["local"].items():
        parts = [one["local"][name][0] for one in found]
        assert sum(parts) == elements
        if ".experts." in name:
            assert set(parts) == {elements // world}


def test_a_checkpoint_is_the_same_whoever_has_the_experts(
    batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """1. Four ranks, two groups of two, save after a step and go on from that; or from what one
    rank saved. 2. One rank goes on from theirs. Result: bit for bit what was saved; as without.
    """
    model = six_experts(tmp_path / "model")
    optimizers = {
        "momentum": {"optimizer": "sgd", "betas": [0.9, 0.95], "learning_rate": 0.05},
        "adamw": ADAMW,
    }
    cases: dict[str, dict[str, Any]] = {}
    for name, case in optimizers.items():
        divided = {**case, "expert_parallel": 2}
        cases[f"{name}-whole"] = divided
        cases[f"{name}-half"] = {**divided, "checkpoints": name, "until": 1}
        cases[f"{name}-again"] = {**divided, "checkpoints": name}
        cases[f"{name}-ones"] = {**divided, "checkpoints": f"{name}-one"}
        train(model, batches, Ranks(), checkpoints=tmp_path / f"{name}-one", until=1, **case)
    see_through(start(model, tmp_path, 4, cases, batches))
    for name, case in optimizers.items():
        alone = train(model, batches, Ranks(), **case).weights
        found = {
            kind: load_file(tmp_path / f"{name}-{kind}.safetensors")
            for kind in ("whole", "half", "again", "ones")
        }
        export = export_checkpoint(tmp_path / name / "step-1", tmp_path / f"{name}-hf")
        exported = load_file(export / "model.safetensors")
        assert exported.keys() == plain_names(model), "the names of the files that it began with"
        policy = load_policy(export)[0].state_dict()
        (tmp_path / name / "step-2").rename(tmp_path / f"{name}-step-2")
        after = train(model, batches, Ranks(), checkpoints=tmp_path / name, **case).weights
        for key, expected in alone.items():
            assert torch.equal(policy[key], found["half"][key]), key
            assert torch.equal(found["again"][key], found["whole"][key]), key
            for weights in (found["whole"], found["ones"], after):
                torch.testing.assert_close(weights[key], expected, atol=2e-5, rtol=1e-3)


def six_experts(out: Path) -> Path:
    """A model whose experts four ranks in two groups hold unevenly: two, two, one and one."""
    architecture = ARCHITECTURES["qwen3-moe"]
    return replace(architecture, own={**architecture.own, "num_experts": 6}).write(out)


def plain_names(model: Path) -> set[str]:
    with safe_open(model / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def test_ranks_that_share_rows_divide_experts(
    batches: list[list[Trajectory]], directory: Path, tmp_path: Path
) -> None:
    case: dict[str, Any] = {"router_replay": True}
    both = {"both": {**case, "sequence_parallel": 2, "expert_parallel": 4}}
    see_through(start(directory, tmp_path, 4, both, batches))
    assert_as_alone(tmp_path, "both", 4, train(directory, batches, Ranks(), **case))


DIVISIBLE = ["qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v3", "glm4-moe", "gpt-oss", "olmoe"]


def test_every_architecture_is_read_trained_and_published_as_by_one_rank(
    batches: list[list[Trajectory]], tmp_path: Path
) -> None:
    """Two ranks hold what Transformers loads, bit for bit, write the bytes of one rank's version,
    and learn the same; see `divided_rank.py`, and there what experts make of any routing.
    """
    models = tmp_path / "models"
    for name in DIVISIBLE:
        ARCHITECTURES[name].write(models / name)
    six_experts(models / "uneven")
    see_through(launch(tmp_path, 2, [str(TESTS / "programs/divided_rank.py"), "2"]))
    cases = {
        name: {"model": str(models / name), "expert_parallel": 2, "max_grad_norm": 0.1}
        for name in ("deepseek-v3", "gpt-oss")
    }
    see_through(start(models, tmp_path, 2, cases, batches[:1]))
    for name in cases:
        alone = train(models / name, batches[:1], Ranks(), max_grad_norm=0.1)
        assert_as_alone(tmp_path, name, 2, alone)
