"""Ranks (FSDP2 over gloo) load and publish models by rows, where asked each its own experts."""

import copy
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_sums, model_terms
from fakes.full_rows import RowShape, full_rows
from fakes.rank_processes import on_ranks
from fakes.slowness import limit
from torch.distributed.tensor import DTensor

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.architectures import PROVEN
from umbra.services.modeling.experts import ExpertGroup, divide_experts
from umbra.services.trainer.distributed.ranks import Ranks, join_ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy, open_policy
from umbra.services.trainer.snapshot import Snapshots, tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest, checksums

DIVISIBLE = ["qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v3", "glm4-moe", "gpt-oss", "olmoe"]


def six_experts(out: Path) -> Path:
    """A model whose experts four ranks in two groups hold unevenly: two, two, one and one."""
    architecture = ARCHITECTURES["qwen3-moe"]
    return replace(architecture, own={**architecture.own, "num_experts": 6}).write(out)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "experts"), [(3, 1), (2, 2)])
def test_ranks_hold_what_transformers_loads_and_write_what_one_would(
    world: int, experts: int, tmp_path: Path
) -> None:
    """Bit for bit, experts, tied weights and buffers included; most rows divide unevenly."""
    proven = [n for n, one in ARCHITECTURES.items() if one.config().model_type in PROVEN]
    models = tmp_path / "models"
    for name in proven if experts == 1 else DIVISIBLE:
        ARCHITECTURES[name].write(models / name)
    six_experts(models / "uneven")
    on_ranks(tmp_path, world, compare_all, experts, models)


def compare_all(experts: int, models: Path) -> None:
    """As one of several ranks: all models, then experts by themselves."""
    config = TrainerConfig(device="cpu", rank_timeout_s=limit(60.0), expert_parallel=experts)
    with join_ranks(config) as ranks:
        for directory in sorted(models.iterdir()):
            compare(directory, config, ranks, models.parent / f"{directory.name}.slot")
        if ranks.experts is None:
            return
        adapters = msgspec.structs.replace(config, lora_rank=2, lora_targets=["experts.down_proj"])
        model, _, files = open_policy(models / "qwen3-moe")
        with pytest.raises(UsageError, match=r"adapters of experts: name other layers"):
            Learner(model, adapters, 1, ranks, files=files)
        for how in ("eager", "grouped_mm", "batched_mm"):
            for name in ("qwen3-moe", "gpt-oss"):
                compare_experts(name, how, ranks.experts)


def compare(directory: Path, config: TrainerConfig, ranks: Ranks, file: Path) -> None:
    plain, _ = load_policy(directory)
    model, _, files = open_policy(directory)
    learner = Learner(model, config, 1, ranks, files=files)
    for name, parameter in learner.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert len(parameter.to_local()) <= -(-len(parameter) // ranks.world), name
        expected = plain.get_parameter(name)
        assert (parameter.shape, parameter.dtype) == (expected.shape, expected.dtype), name
    for name, buffer in learner.model.named_buffers():
        assert torch.equal(buffer, plain.get_buffer(name)), (directory.name, name)
    weights = learner.weights()
    for name, expected in plain.named_parameters() if ranks.rank == 0 else ():
        assert torch.equal(weights[name], expected), (directory.name, name)
    layout = tensor_layout(learner.model, "bfloat16")
    assert layout == tensor_layout(plain, "bfloat16"), "of the same names and shapes"
    manifest = build_manifest(layout, 4096)
    total = manifest.total_bytes
    alone, own = bytearray(b"\xaa" * total), memoryview(bytearray(total))
    write_shards(plain, manifest, memoryview(alone))
    shares = ranks.collect(write_shards(learner.model, manifest, own, ranks.rank, ranks.world), int)
    assert sum(shares) == sum(entry.nbytes for entry in manifest.tensors), "nobody wrote another's"
    assert max(shares) < 1.5 * total / ranks.world
    with torch.no_grad():  # leaves the root gathered
        micro = full_rows(RowShape(1, 8, packed=False))
        learner.score(micro, torch.ones(len(micro.targets)))
    if ranks.rank == 0:
        file.write_bytes(b"\xaa" * total)
    dist.barrier()
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        view = memoryview(mapped)  # in place of a slot of the host's arena
        sums = Snapshots(learner.model, manifest, ranks).write(("", 0), view)
        view.release()
    assert file.read_bytes() == alone, directory.name
    assert sums == checksums(manifest, memoryview(alone))


def compare_experts(name: str, how: str, group: ExpertGroup) -> None:
    """Outputs and gradients for tokens that are spread, and for such as one rank gets none of."""
    model: Any = ARCHITECTURES[name].model()
    model.set_experts_implementation(how)
    layer = model.model.layers[0].mlp
    whole = copy.deepcopy(layer.experts)
    (divided,) = divide_experts(layer, group, group.mesh("cpu")["experts"])
    terms = model_terms(model.config, backward=True)
    generator = torch.Generator().manual_seed(group.rank)
    for choices in (torch.tensor([[0, 2], [3, 1], [2, 3]]), torch.tensor([[1, 0], [0, 1]])):
        tokens = torch.randn(len(choices), 64, generator=generator)
        weights = torch.rand(len(choices), 2, generator=generator)
        found = outcome(divided, tokens, choices, weights)
        for key, tensor in outcome(whole, tokens, choices, weights).items():
            if key in dict(whole.named_parameters()):
                dist.all_reduce(tensor, group=group.group)
                tensor = tensor.chunk(group.size)[group.rank]
            assert_same_sums(found[key], tensor, terms=terms, what=f"{name}, {how}: {key}")


def outcome(
    experts: Any, tokens: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return experts' output and all gradients of a loss; own rows of the parameters'."""
    experts.zero_grad()
    tokens, weights = tokens.clone().requires_grad_(), weights.clone().requires_grad_()
    output = experts(tokens, choices, weights)
    output.square().sum().backward()
    found = {"output": output.detach(), "tokens": tokens.grad, "weights": weights.grad}
    for name, parameter in experts.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}
