"""Devices, models, weights, tokenizers and stop tokens of a directory, or a refusal by name."""

from __future__ import annotations

import json
import operator
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
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


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cpu", 0, "cpu"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_device_is_found(
    name: str, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert pick_device(name) == torch.device(expected)


def test_gpus_that_torch_does_not_see_are_not_left_out_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("umbra.services.modeling.models.driver_version", lambda: "?")
    with pytest.raises(StartupError, match="torch sees no GPU: `umbra check` says why; to compute"):
        pick_device("auto")
    assert pick_device("cpu").type == "cpu"


@pytest.mark.parametrize(
    ("name", "gpus", "said"),
    [
        ("gpu", 1, "device 'gpu': use cpu, cuda, cuda:1, ... or auto"),
        ("cuda", 0, "device 'cuda': this machine has 0 CUDA devices: use cpu or auto"),
        ("cuda:0", 0, "device 'cuda:0': this machine has 0 CUDA devices: use cpu or auto"),
        ("cuda:2", 2, "device 'cuda:2': this machine has 2 CUDA devices: use cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_named(
    name: str, gpus: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UsageError) as caught:
        pick_device(name)
    assert str(caught.value) == said


def test_broken_files_are_told_in_one_sentence(tiny_model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(tiny_model_dir, broken)
    (broken / "model.safetensors").write_bytes(b"nothing")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match=r"model.path: .*model cannot be loaded: "):
        load_model(broken, torch.device("cpu"), torch.float32)
    with pytest.raises(UsageError, match=r"--judge: the tokenizer in .*model cannot be loaded: "):
        load_tokenizer(broken, "--judge")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generation_config.json", "{"),
        ("generation_config.json", "[]"),
        ("config.json", "[" * 100_000),
        ("config.json", '{"layer_types": 5}'),
        ("config.json", '{"layer_types": [["full_attention"]]}'),
        ("config.json", '{"architectures": {}, "model_type": []}'),
        ("config.json", '{"hidden_size": "many"}'),
        ("config.json", '{"num_attention_heads": 0}'),
        ("config.json", '{"rope_parameters": [1]}'),
        ("config.json", None),
    ],
)
def test_a_model_that_nobody_wrote_so_is_refused(
    tiny_model_dir: Path, tmp_path: Path, name: str, text: str | None
) -> None:
    """Damaged, of other types, or a pipe in the place of the file."""
    broken = tmp_path / "model"
    shutil.copytree(tiny_model_dir, broken)
    if text is None:
        (broken / name).unlink()
        os.mkfifo(broken / name)
    elif name == "config.json" and text.endswith("}"):
        own = json.loads((broken / name).read_text())
        (broken / name).write_text(json.dumps(own | json.loads(text)))
    else:
        (broken / name).write_text(text)
    with pytest.raises(UsageError, match=r"model.path: .*model"):
        outline_model(broken)


CODE = """
from transformers import {config}, {model}, PreTrainedTokenizerFast
class OwnConfig({config}): pass
class OwnModel({model}): config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""


def test_code_in_a_model_directory_is_never_run(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_dir, folder)
    config = json.loads((folder / "config.json").read_text())
    (model,) = config["architectures"]
    name = model.removesuffix("ForCausalLM") + "Config"
    (folder / "own.py").write_text(CODE.format(config=name, model=model))
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": own}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    made = [
        load_model(folder, torch.device("cpu"), torch.float32),
        outline_model(folder),
        read_transformers_config(folder),
        Reference(folder).model,
    ]
    assert not [type(one).__name__ for one in made if type(one).__name__.startswith("Own")]
    with pytest.raises(UsageError, match=r"Python code that it brings \(own.OwnTokenizer\)"):
        load_tokenizer(folder)  # which Transformers would read with another class than it names


@pytest.mark.parametrize(
    ("configured", "own", "expected"),
    [(5, 2, {2, 5}), ([5, 6], 2, {2, 5, 6}), (None, 2, {2}), (5, None, {5}), ([], 0, {0})],
)
def test_stop_tokens_are_the_models_and_the_tokenizers(
    configured: Any, own: int | None, expected: set[int]
) -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    assert stop_ids(model, SimpleNamespace(eos_token_id=own, chat_template=None)) == expected


def test_without_a_stop_token_no_turn_would_end() -> None:
    tokenizer = SimpleNamespace(eos_token_id=None, chat_template=None, name_or_path="some/where")
    with pytest.raises(UsageError, match="some/where: neither tokenizer nor model name an eos"):
        stop_ids(SimpleNamespace(generation_config=None), tokenizer)


def test_stop_tokens_that_are_named(tiny_model_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    assert named_tokens(tokenizer, ["a", "b"]) == {
        tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("b"),
    }  # fmt: skip
    assert named_tokens(tokenizer, []) == frozenset()
    for text, count in (("", 0), ("ab", 2)):
        with pytest.raises(UsageError, match=f"stop_tokens: '{text}' is {count} tokens of "):
            named_tokens(tokenizer, ["a", text])


def test_an_outline_knows_the_stop_tokens_of_the_generation_config(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """As the loaded model does: a run that ends turns by both has one set of tokens."""
    directory = tmp_path / "model"
    shutil.copytree(tiny_model_dir, directory)
    text = json.dumps({"eos_token_id": [3, 9]})
    (directory / "generation_config.json").write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(directory)
    whole = load_model(directory, torch.device("cpu"), torch.float32)
    for model in (outline_model(directory), whole):
        assert stop_ids(model, tokenizer) == {3, 9, tokenizer.eos_token_id}


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
