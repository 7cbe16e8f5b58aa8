"""Models made, loaded, exported, and their weights as bytes; rows and buckets that ranks write."""

import json
import os
import shutil
import string
import subprocess
import sys
from contextlib import closing
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.weights import DTYPES
from umbra.services.trainer import snapshot
from umbra.services.trainer.distributed.ranks import Ranks, join_ranks
from umbra.services.trainer.distributed.rendezvous import RankPlace
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import export_policy, load_policy, open_policy, written_whole
from umbra.services.trainer.snapshot import (
    Snapshots,
    checked,
    own_buckets,
    owners_of,
    tensor_layout,
    write_shards,
)
from umbra.services.weights.arena import Arena
from umbra.services.weights.manifest import build_manifest, checksum
from umbra.services.weights.verify import Checksums, Piece


def test_made_models_load_with_the_auto_classes(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    text = string.printable[:95] + "\n  a ,b 's"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "3 1"}, {"role": "assistant", "content": "13"}]
    rendered = tokenizer.apply_chat_template(
        [*chat, *chat[:1]], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|user|>3 1<|assistant|>13<|end|><|user|>3 1<|assistant|>"
    assert tokenizer.decode(tokenizer.eos_token_id) == "<|end|>"
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id
    assert len(model.state_dict()) - 1 == len(list(model.parameters())), "the head is tied"


def test_what_may_not_be_read_is_said_to_be_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container, whose user is not the one who made the model."""
    closed = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("umbra.services.modeling.model_directory.open_regular", closed)
    with pytest.raises(UsageError, match="cannot be read: Permission denied: let the user"):
        check_model_dir(directory)


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


def test_an_export_is_whole_and_replaces_an_older_one(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a process was killed meanwhile, and where the disk is full after the weights."""
    model, tokenizer = load_policy(directory)
    out = tmp_path / "new" / "model"
    monkeypatch.setattr(os, "getpid", Mock(side_effect=count()))  # each is another process
    for _ in range(2):
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        with pytest.raises(SystemExit), written_whole(out) as scratch:
            shutil.copytree(directory, scratch)
            sys.exit("killed")
        export_policy(model, tokenizer, out)
    again, _ = load_policy(out)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert before.keys() >= {"generation_config.json", "chat_template.jinja"}
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(UmbraError, match=r"model cannot be written to .*No space left.* make room"):
        export_policy(model, tokenizer, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [path.name for path in out.parent.iterdir()] == ["model"], "no scratch is left"


def test_a_generation_config_is_exported_as_it_was_read(tmp_path: Path, directory: Path) -> None:
    """Transformers reads many that it refuses to write."""
    source = shutil.copytree(directory, tmp_path / "source")
    file = source / "generation_config.json"
    given = json.loads(file.read_text()) | {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    file.write_text(json.dumps(given))
    out = export_policy(*load_policy(source), tmp_path / "out")
    written = json.loads((out / "generation_config.json").read_text())
    assert (written["temperature"], written["top_p"]) == (0.9, 0.6)
    read, again = (load_policy(folder)[0].generation_config for folder in (source, out))
    assert read is not None and again is not None
    assert again.to_dict() == read.to_dict()


@pytest.mark.parametrize("error", [ValueError("no JSON"), OSError(28, "No space left", "/tmp/x")])
def test_a_model_that_cannot_be_written_again_is_refused_at_the_start(
    directory: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", Mock(side_effect=error))
    with pytest.raises(UsageError, match=f"model.path: .* not saved: .*{error.args[-1]}"):
        open_policy(directory)


@pytest.mark.parametrize("name", list(DTYPES))
def test_a_snapshot_holds_the_state_dict(directory: Path, name: str) -> None:
    model, _ = load_policy(directory)
    dtype = str(DTYPES[name]).removeprefix("torch.")
    manifest = build_manifest(tensor_layout(model, dtype), bucket_bytes=4096)
    slot = bytearray(manifest.total_bytes)
    written = write_shards(model, manifest, memoryview(slot))
    assert written == sum(entry.nbytes for entry in manifest.tensors)
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
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(UsageError, match="--use_fsdp"), join_ranks(TrainerConfig()):
            pass
    for name, value in {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    for config, told in (
        (TrainerConfig(nodes=4), "trainer.nodes = 4, but by WORLD_SIZE = 4 and LOCAL_WORLD_SIZE"),
        (TrainerConfig(sequence_parallel=4), "4 does not divide the 2 ranks of each host"),
    ):
        with pytest.raises(UsageError, match=told), join_ranks(config):
            pass


def test_the_buckets_of_a_host_are_its_ranks_alone() -> None:
    """Two hosts with two ranks: each rank writes rows [r, r + 1) of 4; buckets are single rows."""
    layout = [("rows", "F32", (4, 32)), ("few", "F32", (1, 32)), ("number", "F32", ())]
    written: list[dict[str, tuple[int, int]]] = [{"rows": (r, r + 1)} for r in range(4)]
    written[0] |= {"few": (0, 1), "number": (0, 1)}
    owners = owners_of(written, RankPlace(0, 4, 2))
    assert owners == {"rows": [(2, 0), (4, 1)], "few": [(1, 0)], "number": [(1, 0)]}
    manifest = build_manifest(layout, 192, owners)
    assert manifest.owners[:4] == [0, 0, 1, 1]
    found = [own_buckets(manifest, RankPlace(rank, 4, 2)) for rank in range(4)]
    assert sorted(bucket for part in found for bucket in part) == [*range(len(manifest.buckets))]
    assert all(manifest.owners[b] == rank // 2 for rank in range(4) for b in found[rank])
    assert found[2:] == [[2], [3]]
    # Rows of a host need not lie together: of eight rows the first has the first and the last ones.
    written = [{"x": (0, 2)}, {"x": (6, 8)}, {"x": (2, 4)}, {"x": (4, 6)}]
    assert owners_of(written, RankPlace(0, 4, 2)) == {"x": [(2, 0), (6, 1), (8, 0)]}


def test_what_another_process_wrote_between_ranks_gets_no_valid_checksum() -> None:
    """A bucket of two ranks' rows is changed after they wrote it and before it is hashed."""
    manifest = build_manifest([("x", "F32", (8, 64)), ("y", "F32", (3, 5))], 1024)
    slot = memoryview(bytearray(manifest.total_bytes))
    pieces = list[Piece]()
    for first, last in ((0, 1500), (1500, manifest.total_bytes)):
        meant = Checksums(manifest, slot)
        for start in range(first, last, 100):
            block = memoryview(bytes([start % 251]) * min(100, last - start))
            slot[start : start + len(block)] = block
            meant.copy(start, start + len(block), lambda at, end, block=block: block[at:end])
        pieces += meant.pieces()
    assert len(pieces) == len(manifest.buckets) + 1  # one bucket has rows of both
    for start, stop in manifest.buckets:
        right = checksum(slot[start:stop])
        assert checked(slot, start, stop, pieces) == right
        for at in (start, stop - 1):
            slot[at] ^= 1
            assert checked(slot, start, stop, pieces) not in (right, checksum(slot[start:stop]))
            slot[at] ^= 1


LOCKED = """
import sys
from umbra.services.weights.arena import Arena
print(Arena.attach(sys.argv[1], slot_bytes=int(sys.argv[2])).is_locked(1))
"""


def test_a_rank_has_its_slot_locked_while_it_writes(
    run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(8, 8)
    manifest = build_manifest(tensor_layout(model, "bfloat16"), 4096)
    size = manifest.total_bytes
    arena = Arena.create(run_id, "ranks", slot_bytes=size, slots=2)

    def is_locked() -> str:
        argv = [sys.executable, "-c", LOCKED, str(arena.path), str(size)]
        return subprocess.check_output(argv, text=True, timeout=60).strip()

    seen = list[str]()
    monkeypatch.setattr(snapshot, "write_shards", lambda *_: seen.append(is_locked()))
    try:
        with closing(Snapshots(model, manifest, Ranks())) as writer:
            writer.write((str(arena.path), 1))
            assert (seen, is_locked()) == (["True"], "False")
    finally:
        arena.unlink()
        arena.close()
