"""Devices, models, weights, tokenizers and stop tokens of a directory, or a refusal by name."""

import json
import operator
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter

from umbra.proto.errors import StartupError, UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.architectures import PROVEN
from umbra.services.modeling.models import (
    _not_by_rows,
    load_model,
    open_weights,
    outline_model,
    pick_device,
    read_weights,
)
from umbra.services.modeling.pretrained import (
    load_tokenizer,
    named_tokens,
    read_transformers_config,
    stop_ids,
)
from umbra.services.modeling.reference import Reference
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy, open_policy, place, read

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "gpus", "outcome"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 0, "cpu"),
        ("cuda:1", 2, "cuda:1"),
        ("gpu", 1, "device 'gpu': use cpu, cuda, cuda:1, ... or auto"),
        ("cuda", 0, "device 'cuda': this machine has 0 CUDA devices: use cpu or auto"),
        ("cuda:2", 2, "device 'cuda:2': this machine has 2 CUDA devices: use cuda:0 to cuda:1"),
    ],
)
def test_a_device_is_found_or_named(
    name: str, gpus: int, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    try:
        assert pick_device(name) == torch.device(outcome)
    except UsageError as error:
        assert str(error) == outcome


def test_gpus_unseen_by_torch_are_not_left_out_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("umbra.services.modeling.models.driver_version", lambda: "?")
    with pytest.raises(StartupError, match="torch sees no GPU: `umbra check` says why; to compute"):
        pick_device("auto")
    assert pick_device("cpu").type == "cpu"


@pytest.fixture
def copied(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_model_dir, tmp_path / "model")


def test_broken_files_are_told_in_one_sentence(copied: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"nothing")
    (copied / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"model.path: .*model cannot be loaded: "):
        load_model(copied, CPU, torch.float32)
    with pytest.raises(UsageError, match=r"--judge: the tokenizer in .*model cannot be loaded: "):
        load_tokenizer(copied, "--judge")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", "[]"),
        ("config.json", "[" * 100_000),
        ("config.json", '{"layer_types": 5}'),
        ("config.json", '{"architectures": {}, "model_type": []}'),
        ("config.json", '{"hidden_size": "many"}'),
        ("config.json", '{"rope_parameters": [1]}'),
        ("config.json", None),
    ],
)
def test_a_model_that_nobody_wrote_so_is_refused(copied: Path, name: str, text: str | None) -> None:
    """Damaged, of other types, or a pipe in the place of the file."""
    file = copied / name
    if text is None:
        file.unlink()
        os.mkfifo(file)
    elif text.endswith("}"):
        file.write_text(json.dumps(json.loads(file.read_text()) | json.loads(text)))
    else:
        file.write_text(text)
    with pytest.raises(UsageError, match=r"model.path: .*model"):
        outline_model(copied)


CODE = """
from transformers import {config}, {model}
class OwnConfig({config}): pass
class OwnModel({model}): config_class = OwnConfig
"""


def test_code_in_a_model_directory_is_never_run(copied: Path) -> None:
    """That of a tokenizer: `test_hub_models.py`."""
    config = json.loads((copied / "config.json").read_text())
    (model,) = config["architectures"]
    name = model.removesuffix("ForCausalLM") + "Config"
    (copied / "own.py").write_text(CODE.format(config=name, model=model))
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (copied / "config.json").write_text(json.dumps({**config, "auto_map": own}))
    made = [
        load_model(copied, CPU, torch.float32),
        outline_model(copied),
        read_transformers_config(copied),
        Reference(copied).model,
    ]
    assert not [type(one).__name__ for one in made if type(one).__name__.startswith("Own")]


@pytest.mark.parametrize(
    ("configured", "own", "expected"),
    [([5, 6], 2, {2, 5, 6}), (None, 2, {2}), (5, None, {5}), ([], 0, {0}), (None, None, set())],
)
def test_stop_tokens_are_the_models_and_the_tokenizers(
    configured: Any, own: int | None, expected: set[int]
) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    tokenizer = SimpleNamespace(eos_token_id=own, chat_template=None, name_or_path="some/where")
    refused = pytest.raises(UsageError, match="some/where: neither tokenizer nor model name an eos")
    with nullcontext() if expected else refused:
        assert stop_ids(model, tokenizer) == expected


def test_stop_tokens_of_a_directory(copied: Path) -> None:
    """An outline knows those that the loaded model does; others are named by a run."""
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    tokenizer = load_tokenizer(copied)
    for model in (outline_model(copied), load_model(copied, CPU, torch.float32)):
        assert stop_ids(model, tokenizer) == {3, 9, tokenizer.eos_token_id}
    assert named_tokens(tokenizer, ["a", "b"]) == {*tokenizer.convert_tokens_to_ids(["a", "b"])}
    for text, count in (("", 0), ("ab", 2)):
        with pytest.raises(UsageError, match=f"stop_tokens: '{text}' is {count} tokens of "):
            named_tokens(tokenizer, ["a", text])


RIGHT = [name for name, one in ARCHITECTURES.items() if one.config().model_type in PROVEN]


@pytest.mark.parametrize("name", RIGHT)
def test_weights_are_those_of_the_model_that_transformers_loads(name: str, tmp_path: Path) -> None:
    """Buffers and names too; rows of several ranks: `integration/test_sharded_loading.py`."""
    directory = ARCHITECTURES[name].write(tmp_path / "model")
    for kind in (AutoModelForCausalLM, *([AutoModel] if name == "qwen3-moe" else [])):
        plain: Any = read_weights(kind, directory, torch.float32, "model.path")
        model, files = open_weights(kind, directory, "model.path")
        assert all(parameter.is_meta for parameter in model.parameters())
        place(model, CPU, parameters_at=CPU)
        read(model, files)
        assert model.state_dict().keys() == plain.state_dict().keys()
        for key, tensor in (*plain.named_parameters(), *plain.named_buffers()):
            assert torch.equal(operator.attrgetter(key)(model), tensor), key
        assert model.config.to_dict() == plain.config.to_dict()
        if kind is AutoModelForCausalLM:
            assert model.generation_config.to_dict() == plain.generation_config.to_dict()


def learner_of(directory: Path) -> Learner:
    model, _, files = open_policy(directory)
    return Learner(model, TrainerConfig(device="cpu"), 1, files=files)


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    return ARCHITECTURES["qwen3-moe"].write(tmp_path / "model")


def test_a_checkpoint_in_several_files_and_another_precision(experts: Path, tmp_path: Path) -> None:
    model, tokenizer = load_policy(experts)
    out = tmp_path / "cut"
    model.bfloat16().save_pretrained(out, max_shard_size="40KB")
    tokenizer.save_pretrained(out)
    assert len(list(out.glob("*.safetensors"))) > 2
    plain, _ = load_policy(out)
    for key, parameter in learner_of(out).model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(key)), key


def test_a_weight_that_is_missing_or_of_another_shape_is_named(experts: Path) -> None:
    file = experts / "model.safetensors"
    tensors = load_file(file)
    for key, replaced, told in (
        ("model.norm.weight", None, "have no model.norm.weight"),
        ("model.norm.weight", torch.ones(3), r"norm.weight is \[3\], config.json says \[64\]"),
        ("model.layers.0.mlp.experts.2.up_proj.weight", None, "gate_up_proj: Sizes of tensors"),
        ("model.layers.0.mlp.experts.2.up_proj.weight", torch.ones(3, 3), "cannot be loaded"),
    ):
        other = {**tensors, key: replaced}
        save_file({k: v for k, v in other.items() if v is not None}, file, {"format": "pt"})
        with pytest.raises(UsageError, match=told):
            learner_of(experts)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    directory = ARCHITECTURES["qwen3-tied"].write(tmp_path / "model")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    refused = pytest.raises(UsageError, match=r"is tied to .*set tie_word_embeddings to false")
    for added, outcome in ((0, nullcontext()), (1, refused)):
        other = tensors["model.embed_tokens.weight"] + added
        save_file({**tensors, "lm_head.weight": other}, file, {"format": "pt"})
        with outcome:
            learner_of(directory)


def test_results_whose_rows_are_not_those_of_the_files_are_refused() -> None:
    merge = [MergeModulelist(dim=0), Concatenate(dim=1)]
    stacked = WeightConverter(["experts.*.gate", "experts.*.up"], "experts.gate_up", merge)
    cut = WeightConverter("qkv_proj", ["q_proj", "k_proj"], [Chunk(dim=0)])
    assert not _not_by_rows(cut), "it was not used"
    assert stacked.rename_source_key("layers.0.experts.1.up")[1] is not None
    assert cut.rename_source_key("layers.0.qkv_proj.weight")[1] is not None
    assert not _not_by_rows(stacked)
    assert _not_by_rows(cut) == "qkv_proj can't be read by rows: set trainer.ranks = 1"
