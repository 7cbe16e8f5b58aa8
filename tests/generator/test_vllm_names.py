"""Names and places of a version's tensors in a checkpoint."""

from pathlib import Path

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from umbra.proto.errors import UsageError
from umbra.proto.records import Manifest, TensorEntry
from umbra.services.generator.vllm.updates import CheckpointNames
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
