"""A held version as a Hugging Face directory, written without torch.

The weights become one `model.safetensors`. All else (configuration, tokenizer) is copied from the
directory that the run started from. An adapter becomes a directory as peft writes it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from umbra.proto.errors import UmbraError
from umbra.proto.records import AdapterFacts, Manifest
from umbra.services.process.disk import DISK
from umbra.services.weights.manifest import checksums
from umbra.services.weights.safetensors_file import Stored, write_safetensors

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# Weights in any format, and the indices of sharded ones: what this version replaces.
WEIGHT_SUFFIXES = (
    ".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf",
    ".h5", ".msgpack", ".onnx", ".ckpt",
)  # fmt: skip


def export_version(
    manifest: Manifest,
    data: memoryview,
    sums: list[int],
    model_dir: Path,
    out: Path,
    base: str = "",
) -> None:
    """Write the version in `data`, `[manifest.total_bytes]`, as directory `out`, whole or not.

    `base` is what an adapter calls its model; `model_dir`, if not given.

    Raises:
        UmbraError: the bytes are not those that were published, or peft has no names for them.
        OSError: it cannot be written.
    """
    if checksums(manifest, data) != sums:
        raise UmbraError("the version in memory is not the one that was published")
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        if manifest.adapter is None:
            _write_model(manifest, data, model_dir, scratch)
        else:
            _write_adapter(manifest, manifest.adapter, data, base or str(model_dir), scratch)
        DISK.sync_tree(scratch)
        scratch.rename(out)
        DISK.sync_directory(out.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _write_model(manifest: Manifest, data: memoryview, model_dir: Path, out: Path) -> None:
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and path.name[0] != "." and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, out / path.name)
    _set_dtype(out / "config.json", manifest)
    write_safetensors(out / "model.safetensors", _stored(manifest, data), {"format": "pt"})


def _write_adapter(
    manifest: Manifest, adapter: AdapterFacts, data: memoryview, base: str, out: Path
) -> None:
    layers: list[str] = []
    for entry in manifest.tensors:
        layer, _, factor = entry.name.partition(".lora_")
        if factor != "A.weight":
            continue
        if entry.shape[:1] != [adapter.rank]:
            raise UmbraError(
                f"{layer} is of experts, which peft's files name by their order: export a "
                "checkpoint with `umbra export`, which merges the adapter"
            )
        layers.append(layer)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": layers,
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    factors = _stored(manifest, data, "base_model.model.")
    write_safetensors(out / "adapter_model.safetensors", factors, {"format": "pt"})


def _stored(manifest: Manifest, data: memoryview, prefix: str = "") -> Iterator[Stored]:
    return (
        Stored(prefix + e.name, e.dtype, e.shape, data[e.offset : e.offset + e.nbytes])
        for e in manifest.tensors
    )


def _set_dtype(path: Path, manifest: Manifest) -> None:
    """Let `config.json` name the dtype that the weights have now (of most of the bytes)."""
    sizes: dict[str, int] = {}
    for entry in manifest.tensors:
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = DTYPES[max(sizes, key=lambda name: sizes[name])]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
