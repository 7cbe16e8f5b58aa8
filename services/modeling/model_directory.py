"""The directory of a model that a key or flag names, and its files; nothing is loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

from umbra.proto.errors import UsageError
from umbra.services.modeling.hub import fetch, is_hub_name
from umbra.services.process.files import open_regular

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model")
PIECE_BYTES = 8 << 20  # of a file, read at once
READ_SUFFIXES = (".json", ".safetensors", ".model")


def directory_of(
    name: str | Path, source: str = "model.path", *, weights: bool = True, code: bool = False
) -> Path:
    """Return the directory of the model `name`: itself, or where the hub's cache has it.

    A name on the hub, ORG/NAME[@REVISION], is downloaded if need be; `weights`, `code` and errors
    as of `hub.fetch`.
    """
    hub_name = is_hub_name(str(name))
    return fetch(str(name), source, weights=weights, code=code) if hub_name else Path(name)


def check_out(out: Path) -> None:
    """Raise UsageError if a model at `--out` would replace something other than a model."""
    folder = out.resolve()
    if folder in (here := Path.cwd(), *here.parents):
        raise UsageError(f"--out {out} is the current directory or one above: name another folder")
    taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken and not all((folder / n).is_file() for n in ("config.json", "tokenizer_config.json")):
        raise UsageError(f"--out {out} exists and holds no model: name another folder")


def check_model_dir(
    path: str | Path,
    source: str = "model.path",
    *,
    tokenizer: bool = True,
    weights: bool = True,
    code: bool = False,
) -> Path:
    """Return the directory of a model, with config, safetensors weights, and a `tokenizer` if so.

    Args as of `directory_of`; a directory has to have weights anyway. Raises UsageError for a
    missing file, StartupError if the hub cannot be reached.
    """
    if not str(path):
        raise UsageError(
            f"{source} is empty: name a Hugging Face model directory, or a model on the hub"
        )
    weights_needed = weights or not is_hub_name(str(path))
    directory = directory_of(path, source, weights=weights, code=code)
    try:
        files = {file.name for file in directory.iterdir()} if directory.is_dir() else None
        for name in sorted(files or ()):
            if name.endswith(READ_SUFFIXES):
                os.close(open_regular(directory / name))
    except OSError as error:
        remedy = f": let the user with uid {os.geteuid()}, as whom this process runs, read it"
        remedy = remedy if isinstance(error, PermissionError) else ""
        reason = f"{error.filename} cannot be read: {error.strerror}{remedy}"
        raise UsageError(f"{source}: {reason}") from error
    if files is None and directory.suffix == ".gguf":
        raise UsageError(
            f"{source}: {directory} is a GGUF file, which is not read: name the directory of the "
            "same model with safetensors weights, or its name on the hub (ORG/NAME)"
        )
    if files is None:
        raise UsageError(
            f"{source}: {directory} is no directory; download the model there, name one on the hub "
            "(ORG/NAME), or make a small one with `umbra make-model`"
        )
    for what, names, needed in (
        ("config", ("config.json",), True),
        ("tokenizer", TOKENIZER_FILES, tokenizer),
        ("safetensors weights", WEIGHT_FILES, weights_needed),
    ):
        if needed and files.isdisjoint(names):
            raise UsageError(f"{source}: {directory} has no {what} ({' or '.join(names)})")
    if weights and WEIGHT_FILES[0] not in files:
        _check_index(directory / WEIGHT_FILES[1], source)
    return directory


def _check_index(index: Path, source: str) -> None:
    """Raise UsageError unless all files in `index` are safetensors files beside it.

    Transformers reads files of other names with `torch.load`.
    """
    try:
        shards: list[object] = list(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{source}: {index} is no index of safetensors files ({type(error).__name__}): "
            "download it again"
        ) from error
    for name in shards:
        if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name:
            raise UsageError(
                f"{source}: {index} names {name!r}, and weights are read from .safetensors files "
                "beside it only: save the model with safe_serialization=True"
            )


def weights_bytes(path: str | Path) -> int:
    """Return the size of all local weight files of a model; 0 where there are none."""
    directory = directory_of(path, weights=False)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def weights_checksum(path: str | Path) -> str:
    """Return XXH3 over all weight files of a model, in hexadecimal."""
    checksum = xxhash.xxh3_64()
    for file in sorted(directory_of(path).glob("*.safetensors")):
        own = xxhash.xxh3_64()
        with file.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                own.update(piece)
        checksum.update(own.intdigest().to_bytes(8))
    return checksum.hexdigest()
