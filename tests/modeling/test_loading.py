"""Devices, models, tokenizers and stop tokens from a directory: found, or refused by name."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from umbra.proto.errors import StartupError, UsageError
from umbra.services.modeling.models import load_model, outline_model, pick_device
from umbra.services.modeling.pretrained import (
    load_tokenizer,
    named_tokens,
    read_transformers_config,
    stop_ids,
)
from umbra.services.modeling.reference import Reference


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
