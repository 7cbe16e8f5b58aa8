"""Models made, loaded, exported, and their weights as bytes."""

import json
import os
import shutil
import string
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.weights import DTYPES
from umbra.services.trainer.distributed.ranks import join_ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.policy import export_policy, load_policy, open_policy
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / "tiny"
    assert make_model(path) == 105_152
    return path


def test_made_models_load_with_the_auto_classes(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    text = string.printable[:95] + "\n  a ,b 's"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [
        {"role": "user", "content": "3 1"},
        {"role": "assistant", "content": "13"},
        {"role": "user", "content": "more"},
    ]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|user|>3 1<|assistant|>13<|end|><|user|>more<|assistant|>"
    assert tokenizer.decode(tokenizer.eos_token_id) == "<|end|>"
    ids = tokenizer.apply_chat_template(chat[:2], return_dict=False)
    assert len(ids) == 1 + 3 + 1 + 2 + 1, "one token per character and per marker"
    assert max(tokenizer(text)["input_ids"]) < len(tokenizer)

    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id
    assert len(model.state_dict()) - 1 == len(list(model.parameters())), "the head is tied"
    prompt = torch.tensor([tokenizer("hello")["input_ids"]])
    answer = model.generate(prompt, max_new_tokens=3, min_new_tokens=3)  # pyright: ignore[reportAttributeAccessIssue]
    assert answer.shape == (1, 8)


@pytest.mark.parametrize("closed", ["model.safetensors", "tokenizer.json", ""])
def test_what_may_not_be_read_is_said_to_be_so(tmp_path: Path, closed: str) -> None:
    """As in a container, whose user is not the one who made the model."""
    with tempfile.TemporaryDirectory() as parent:  # pytest's own folders are closed to others
        Path(parent).chmod(0o755)
        directory = Path(parent) / "model"
        make_model(directory, hidden=16, layers=1, ff=16)
        (directory / closed).chmod(0)
        user = os.geteuid()
        os.seteuid(user or 10001)  # root may read everything
        try:
            with pytest.raises(UsageError, match="cannot be read: Permission denied: let the user"):
                check_model_dir(directory)
        finally:
            os.seteuid(user)
            (directory / closed).chmod(0o700)


@pytest.mark.parametrize("shard", ["pytorch_model.bin", "../model.safetensors", "/etc/passwd", 3])
def test_an_index_names_safetensors_only(directory: Path, tmp_path: Path, shard: object) -> None:
    """Transformers would read a file of another name with torch.load."""
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    (copy / "model.safetensors").rename(copy / "part.safetensors")
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    assert check_model_dir(copy) == copy
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors", "b": shard}}))
    with pytest.raises(UsageError, match=r"names .*read from \.safetensors files beside it only"):
        check_model_dir(copy)
    index.write_text("[]")
    with pytest.raises(UsageError, match="is no index of safetensors files"):
        check_model_dir(copy)


def test_an_export_is_whole_and_replaces_an_older_one(tmp_path: Path, directory: Path) -> None:
    model, tokenizer = load_policy(directory)
    out = tmp_path / "new" / "model"
    export_policy(model, tokenizer, out)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)  # pyright: ignore[reportCallIssue]
    export_policy(model, tokenizer, out)
    again, _ = load_policy(out)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert [path.name for path in out.parent.iterdir()] == ["model"], "no scratch is left"
    assert (out / "generation_config.json").is_file()
    assert (out / "chat_template.jinja").is_file()


def test_a_generation_config_is_exported_as_it_was_read(tmp_path: Path, directory: Path) -> None:
    """Transformers reads many that it refuses to write."""
    source = shutil.copytree(directory, tmp_path / "source")
    file = source / "generation_config.json"
    given = json.loads(file.read_text()) | {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    file.write_text(json.dumps(given))
    model, tokenizer, _ = open_policy(source)
    loaded, _ = load_policy(source)
    out = export_policy(loaded, tokenizer, tmp_path / "out")
    written = json.loads((out / "generation_config.json").read_text())
    assert {key: written[key] for key in given if key in written} == {
        key: value for key, value in given.items() if key in written
    }
    assert (written["temperature"], written["top_p"]) == (0.9, 0.6)
    again, _ = load_policy(out)
    assert again.generation_config is not None
    assert again.generation_config.to_dict() == model.generation_config.to_dict()


def test_a_model_that_cannot_be_written_again_is_refused_at_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: object, **_more: object) -> None:
        raise ValueError("no JSON")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", fails)
    with pytest.raises(UsageError, match=r"model.path: .* can be read, but not saved: no JSON"):
        open_policy(directory)


@pytest.mark.parametrize("name", list(DTYPES))
def test_a_snapshot_holds_the_state_dict(directory: Path, name: str) -> None:
    model, _ = load_policy(directory)
    dtype = str(DTYPES[name]).removeprefix("torch.")
    manifest = build_manifest(tensor_layout(model, dtype), bucket_bytes=4096)
    slot = bytearray(manifest.total_bytes)
    assert write_shards(model, manifest, memoryview(slot)) == sum(
        e.nbytes for e in manifest.tensors
    )
    state = model.state_dict()
    names = [entry.name for entry in manifest.tensors]
    assert names == [one for one in state if one != "lm_head.weight"], "tied weights once"
    for entry in manifest.tensors:
        area = slot[entry.offset : entry.offset + entry.nbytes]
        found = torch.frombuffer(area, dtype=DTYPES[name]).view(entry.shape)
        assert torch.equal(found, state[entry.name].to(DTYPES[name])), entry.name
        assert entry.dtype == name
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == sorted(names), "the names of the Hugging Face file"


def test_devices_and_ranks_that_are_not_there_are_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_policy(directory)
    with pytest.raises(UsageError, match=r"trainer\.device"):
        Learner(model, TrainerConfig(device="tpu"), steps=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for config, told in (
        (TrainerConfig(ranks=3), "WORLD_SIZE is 2"),
        (TrainerConfig(sequence_parallel=3), "sequence_parallel = 3 does not divide"),
        (TrainerConfig(expert_parallel=3), "expert_parallel = 3 does not divide"),
        (TrainerConfig(), "RANK is missing"),
    ):
        with pytest.raises(UsageError, match=told), join_ranks(config):
            pass
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UsageError, match="--use_fsdp"), join_ranks(TrainerConfig()):
        pass
    for name, value in {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    hosts = r"trainer.nodes = 4, but by WORLD_SIZE = 4 and LOCAL_WORLD_SIZE = 2 .* 2"
    with pytest.raises(UsageError, match=hosts), join_ranks(TrainerConfig(nodes=4)):
        pass
    shared, told = TrainerConfig(sequence_parallel=4), r"4 does not divide the 2 ranks of each host"
    with pytest.raises(UsageError, match=told), join_ranks(shared):
        pass


def test_a_full_disk_leaves_the_older_export(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs out after the weights, before the tokenizer."""
    model, tokenizer = load_policy(directory)
    out = export_policy(model, tokenizer, tmp_path / "model")
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(UmbraError, match=r"model cannot be written to .*No space left.* make room"):
        export_policy(model, tokenizer, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"], "nothing half is left"
