"""A model's weights from its files, against what Transformers loads."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
)

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.architectures import PROVEN
from umbra.services.modeling.models import open_weights, read_weights
from umbra.services.modeling.weight_files import _not_by_rows
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy, open_policy, place, read

RIGHT = [name for name, one in ARCHITECTURES.items() if one.config().model_type in PROVEN]


@pytest.mark.parametrize("name", RIGHT)
def test_weights_are_those_of_the_model_that_transformers_loads(name: str, tmp_path: Path) -> None:
    """Buffers and names too; rows of several ranks: `divided_rank.py`."""
    directory = ARCHITECTURES[name].write(tmp_path / "model")
    for kind in (
        (AutoModelForCausalLM, AutoModel) if name == "qwen3-moe" else (AutoModelForCausalLM,)
    ):
        plain: Any = read_weights(kind, directory, torch.float32, "model.path")
        model, files = open_weights(kind, directory, "model.path")
        assert all(parameter.is_meta for parameter in model.parameters())
        place(model, torch.device("cpu"), parameters_at=torch.device("cpu"))
        read(model, files)
        assert model.state_dict().keys() == plain.state_dict().keys()
        for key, tensor in (*plain.named_parameters(), *plain.named_buffers()):
            assert torch.equal(operator.attrgetter(key)(model), tensor), key
        assert model.config.to_dict() == plain.config.to_dict()
        if kind is AutoModelForCausalLM:
            assert model.generation_config.to_dict() == plain.generation_config.to_dict()


def test_a_checkpoint_in_several_files_and_another_precision(tmp_path: Path) -> None:
    directory = ARCHITECTURES["qwen3-moe"].write(tmp_path / "model")
    model, tokenizer = load_policy(directory)
    out = tmp_path / "cut"
    model.bfloat16().save_pretrained(out, max_shard_size="40KB")
    tokenizer.save_pretrained(out)
    assert len(list(out.glob("*.safetensors"))) > 2
    plain, _ = load_policy(out)
    opened, _, files = open_policy(out)
    learner = Learner(opened, TrainerConfig(device="cpu"), 1, files=files)
    for key, parameter in learner.model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(key)), key


def test_a_weight_that_is_missing_or_of_another_shape_is_named(tmp_path: Path) -> None:
    directory = ARCHITECTURES["qwen3-moe"].write(tmp_path / "model")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for key, replaced, told in (
        ("model.norm.weight", None, "have no model.norm.weight"),
        ("model.norm.weight", torch.ones(3), r"norm.weight is \[3\], config.json says \[64\]"),
        ("model.layers.0.mlp.experts.2.up_proj.weight", None, "gate_up_proj: Sizes of tensors"),
        ("model.layers.0.mlp.experts.2.up_proj.weight", torch.ones(3, 3), "cannot be loaded"),
    ):
        other = {k: v for k, v in tensors.items() if k != key or replaced is not None}
        if replaced is not None:
            other[key] = replaced
        save_file(other, file, {"format": "pt"})
        with pytest.raises(UsageError, match=told):
            model, _, files = open_policy(directory)
            Learner(model, TrainerConfig(device="cpu"), 1, files=files)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    directory = ARCHITECTURES["qwen3-tied"].write(tmp_path / "model")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for added in (0, 1):
        other = tensors["model.embed_tokens.weight"] + added
        save_file({**tensors, "lm_head.weight": other}, file, {"format": "pt"})
        model, _, files = open_policy(directory)
        if not added:
            Learner(model, TrainerConfig(device="cpu"), 1, files=files)
            continue
        with pytest.raises(UsageError, match=r"is tied to .*set tie_word_embeddings to false"):
            Learner(model, TrainerConfig(device="cpu"), 1, files=files)


def test_results_whose_rows_are_not_those_of_the_files_are_refused() -> None:
    cut = WeightConverter("qkv_proj", ["q_proj", "k_proj"], [Chunk(dim=0)])
    stacked = WeightConverter(
        ["experts.*.gate", "experts.*.up"],
        "experts.gate_up",
        [MergeModulelist(dim=0), Concatenate(dim=1)],
    )
    assert not _not_by_rows(cut), "it was not used"
    for rule, key in ((cut, "layers.0.qkv_proj.weight"), (stacked, "layers.0.experts.1.up")):
        assert rule.rename_source_key(key)[1] is not None
    assert _not_by_rows(cut) == "qkv_proj can't be read by rows: set trainer.ranks = 1"
    assert not _not_by_rows(stacked)
