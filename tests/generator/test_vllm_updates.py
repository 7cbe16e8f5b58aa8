"""Effects of a new version on vLLM: names of tensors, whose keys are read, what a check finds."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from umbra.deploy.model_check.check import compare_vllm
from umbra.proto.errors import StartupError, UsageError
from umbra.proto.records import Manifest, TensorEntry
from umbra.services.generator.vllm import check as vllm_check
from umbra.services.generator.vllm.check import Differences, stale
from umbra.services.generator.vllm.updates import CheckpointNames, Salts
from umbra.services.modeling.weights import tensors_in
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest

# One for each way in which checkpoints name experts and layers.
NAMES = ("llama", "qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss", "olmoe")


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", NAMES)
def test_a_version_is_a_checkpoint_by_other_names(name: str, tmp_path: Path) -> None:
    """Bit for bit, at the places that the names say, within the bytes that the trainer wrote."""
    architecture = ARCHITECTURES[name]
    disk = load_file(architecture.write(tmp_path / name) / "model.safetensors")
    model = architecture.model()
    manifest = build_manifest(tensor_layout(model, "float32"), 4096)
    slot = memoryview(bytearray(manifest.total_bytes))
    write_shards(model, manifest, slot)
    names = CheckpointNames(outline(model.config))
    entries = [part for entry in manifest.tensors for part in names.of(entry)]
    assert {entry.name for entry in entries} == set(disk)
    renamed = Manifest(tensors=entries, buckets=[], total_bytes=0, digest="")
    for name, tensor in tensors_in(renamed, slot):
        assert torch.equal(tensor, disk[name]), name


def test_half_precision_takes_half_the_place() -> None:
    names = CheckpointNames(outline(ARCHITECTURES["mixtral"].config()))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    entry = TensorEntry(
        name=name, dtype="BF16", shape=[4, 192, 64], offset=640, nbytes=4 * 192 * 64 * 2
    )
    parts = {part.name.rpartition("experts.")[2]: part for part in names.of(entry)}
    third = parts["3.w3.weight"]
    assert (third.offset, third.nbytes, third.shape) == (
        640 + (3 * 192 + 96) * 64 * 2,
        96 * 64 * 2,
        [96, 64],
    )
    assert len(parts) == 8


def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ARCHITECTURES["llama"].config()
    model = outline(config)
    transposed = WeightConverter(
        source_patterns=["mlp.down_proj.weight"],
        target_patterns=["mlp.down_proj.weight"],
        operations=[Transpose(0, 1)],
    )
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes the table
    table = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(table, "llama", [transposed])
    with pytest.raises(UsageError, match=r"LlamaForCausalLM have .*down_proj.* in another layout"):
        CheckpointNames(model)


def test_a_group_shares_and_a_session_goes_on_alone_after_new_weights() -> None:
    salts = Salts()
    salts.loaded(3, keep=True)
    first = salts.of("a")
    assert first == salts.of("b") == salts.of("")
    salts.used("a", first)
    assert salts.of("a") == first, "weights are the same"
    salts.loaded(4, keep=True)
    own = salts.of("a")
    assert own not in (first, salts.of("b"), salts.of(""))
    salts.used("a", own)
    salts.loaded(5, keep=True)
    assert salts.of("a") == own, "read again once, at the first load, and never again"


def test_without_keep_and_by_a_forgotten_name_all_begin_again() -> None:
    salts = Salts()
    salts.loaded(0, keep=True)
    salts.used("a", salts.of("a"))
    salts.loaded(1, keep=True)
    own = salts.of("a")
    salts.used("a", own)
    salts.loaded(2, keep=False)
    salts.used("a", own)  # an answer that came late: its salt is of older weights
    assert salts.of("a") not in (own, salts.shared)
    salts.forget("a")
    salts.forget("never")
    assert not salts._last
    assert salts.of("a") == salts.shared


def test_nobody_reads_what_older_weights_made_of_anothers_tokens() -> None:
    """Whatever the order of loads and turns: a salt of before a load has one reader after it."""
    source = random.Random(1)
    for _ in range(200):
        salts, made = Salts(), {}  # by salt: sessions that read under it, and since which load
        salts.loaded(0, keep=True)
        running: dict[str, str] = {}
        load = 0
        for _ in range(60):
            name = f"s{source.randrange(4)}"
            match source.randrange(4):
                case 0:
                    load += 1
                    salts.loaded(load, keep=source.random() < 0.9)
                case 1 if name in running:
                    salts.used(name, running.pop(name))
                case 2 if name not in running:
                    salts.forget(name)
                    made = {
                        salt: {(who, at) for who, at in users if who != name}
                        for salt, users in made.items()
                    }
                case _ if name not in running:
                    salt = running[name] = salts.of(name)
                    older = {who for who, at in made.get(salt, set()) if at < load}
                    assert older <= {name}
                    made.setdefault(salt, set()).add((name, load))


def sums(*digests: str) -> dict[str, dict[str, str]]:
    """Of one weight and a scale that no publish changes, in two workers."""
    return {f"tp{worker}": {"w": digest, "scale": "1"} for worker, digest in enumerate(digests)}


@pytest.mark.parametrize(
    ("disk", "same", "changed", "again", "found"),
    [
        ("ab", "ab", "cd", "ab", ()),
        ("ab", "ab", "cb", "ab", ("tp1 w",)),  # one worker kept its weights
        ("ab", "ax", "cd", "ax", ("tp1 w",)),  # a publish is not what the disk has
        ("ab", "ab", "cd", "cb", ("tp0 w",)),  # the third publish did not come
        ("ab", "ab", "ab", "ab", ("tp0 scale", "tp0 w", "tp1 scale", "tp1 w")),
    ],
)
def test_parameters_that_a_publish_did_not_reach(
    disk: str, same: str, changed: str, again: str, found: tuple[str, ...]
) -> None:
    assert stale(sums(*disk), sums(*same), sums(*changed), sums(*again)) == found


CONFIG = SimpleNamespace(hidden_size=64, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("changed", "stale", "outcomes"),
    [
        (0.01, (), ["equal"] * 4),
        (0.9, (), ["equal", "equal", "different", "equal"]),
        (0.01, ("tp1 w",), ["equal"] * 3 + ["different"]),
    ],
)
def test_the_rows_of_a_check_of_a_model(
    changed: float, stale: tuple[str, ...], outcomes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Differences(0.01, 0.01, changed, 1.0, "bfloat16", 2, stale)
    monkeypatch.setattr(vllm_check, "vllm_differences", lambda *_, **_arguments: result)
    assert [row.outcome for row in compare_vllm(Path("model"), CONFIG)] == outcomes


@pytest.mark.parametrize("error", [UsageError, StartupError])
@pytest.mark.parametrize("gpu", [False, True])
def test_only_on_a_gpu_a_failed_start_is_an_error(
    error: type[UsageError | StartupError], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **_arguments: object) -> Differences:
        raise error("why")

    monkeypatch.setattr(vllm_check, "vllm_differences", refuse)
    monkeypatch.setattr(vllm_check, "on_gpu", lambda: gpu)
    rows = compare_vllm(Path("model"), CONFIG)
    if gpu and error is StartupError:
        with pytest.raises(StartupError, match="why"):
            list(rows)
    else:
        assert [(row.outcome, row.note) for row in rows] == [("left out", "why")]
