"""What must lie in a Hugging Face model directory, checked without loading anything."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from umbra.proto.errors import UsageError
from umbra.services.runtime.weights.safetensors_file import checksum_of

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
READ_SUFFIXES = (".json", ".safetensors", ".model")


def check_model_dir(
    path: str | Path, source: str = "model.path", *, tokenizer: bool = True
) -> Path:
    """`path` as a directory with config, tokenizer and safetensors weights.

    Args:
        path: the directory.
        source: the key or flag it came from, for the error.
        tokenizer: False if it does not need one.

    Raises:
        UsageError: what is missing, and where.
    """
    if not str(path):
        raise UsageError(f"{source} is empty: name a Hugging Face model directory")
    directory = Path(path)
    try:
        files = {file.name for file in directory.iterdir()} if directory.is_dir() else None
    except OSError as error:
        raise _unreadable(error, source) from error
    if files is None:
        raise UsageError(
            f"{source}: {directory} is no directory; download the model there, or make a small one "
            "with `umbra make-model`"
        )
    for what, names in (
        ("config", ("config.json",)),
        *([("tokenizer", TOKENIZER_FILES)] if tokenizer else []),
        ("safetensors weights", WEIGHT_FILES),
    ):
        if files.isdisjoint(names):
            raise UsageError(f"{source}: {directory} has no {what} ({' or '.join(names)})")
    for name in sorted(files):
        if name.endswith(READ_SUFFIXES):
            try:
                (directory / name).open("rb").close()
            except OSError as error:
                raise _unreadable(error, source) from error
    return directory


def _unreadable(error: OSError, source: str) -> UsageError:
    """What to say when the operating system refuses to open a file or folder of the model."""
    remedy = ""
    if isinstance(error, PermissionError):
        remedy = f": let the user with uid {os.geteuid()}, as whom this process runs, read it"
    return UsageError(f"{source}: {error.filename} cannot be read: {error.strerror}{remedy}")


def weights_bytes(path: str | Path) -> int:
    """Size of all weight files in a model directory; 0 where there are none."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def weights_checksum(path: str | Path) -> str:
    """XXH3 over all weight files in a model directory, in hexadecimal."""
    checksum = xxhash.xxh3_64()
    for file in sorted(Path(path).glob("*.safetensors")):
        checksum.update(checksum_of(file).checksum.to_bytes(8))
    return checksum.hexdigest()
