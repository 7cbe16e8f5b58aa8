"""Rows of a model's weights from its files, against what Transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.architectures import PROVEN
from umbra.services.modeling.models import open_weights, read_weights
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy, open_policy

RIGHT = [name for name, one in ARCHITECTURES.items() if one.config().model_type in PROVEN]


@pytest.mark.parametrize("name", RIGHT)
def test_rows_are_those_of_the_model_that_transformers_loads(name: str, tmp_path: Path) -> None:
    """Two halves, three parts of which the last is smaller, and all; buffers and names too."""
    directory = ARCHITECTURES[name].write(tmp_path / "model")
    for kind in (
        (AutoModelForCausalLM, AutoModel) if name == "qwen3-moe" else (AutoModelForCausalLM,)
    ):
        plain: Any = read_weights(kind, directory, torch.float32, "model.path")
        model, files = open_weights(kind, directory, "model.path")
        assert files is not None
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.state_dict().keys() == plain.state_dict().keys()
        for key, whole in plain.named_parameters():
            for parts in (1, 2, 3):
                places = [torch.full_like(part, torch.nan) for part in whole.detach().chunk(parts)]
                first = 0
                for place in places:
                    files.read(key, place, first)
                    first += len(place)
                assert torch.equal(torch.cat(places), whole), (key, parts)
        buffers = dict(model.named_buffers())
        for key, buffer in plain.named_buffers():
            assert torch.equal(buffers[key], buffer), key
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
        (
            "model.norm.weight",
            torch.ones(3),
            r"norm.weight is \[3\], config.json says \[64\]",
        ),
        ("model.layers.0.mlp.experts.2.up_proj.weight", None, "experts.gate_up_proj has"),
        ("model.layers.0.mlp.experts.2.up_proj.weight", torch.ones(3, 3), "cannot be loaded"),
    ):
        other = {k: v for k, v in tensors.items() if k != key or replaced is not None}
        if replaced is not None:
            other[key] = replaced
        save_file(other, file, {"format": "pt"})
        with pytest.raises(UsageError, match=told):
            model, _, files = open_policy(directory)
            Learner(model, TrainerConfig(device="cpu"), 1, files=files)


def test_tied_weights_that_differ_are_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = ARCHITECTURES["qwen3-tied"].write(tmp_path / "model")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        file,
        {"format": "pt"},
    )
    model, _, files = open_policy(directory)
    assert files is not None
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        file,
        {"format": "pt"},
    )
    model, _, files = open_policy(directory)
    assert files is None
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert "every rank loads the whole" in caplog.text
