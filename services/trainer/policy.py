"""The policy as a Hugging Face directory: checked before it is loaded, exported whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from umbra.proto.errors import UsageError

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def load_policy(path: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The float32 model (SDPA attention, on the CPU) and the tokenizer in directory `path`.

    Raises:
        UsageError: no such directory, a part of it is missing, or it cannot be loaded.
    """
    directory = check_directory(path)
    try:
        with no_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            model = AutoModelForCausalLM.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                attn_implementation="sdpa",
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UsageError(f"model.path {directory} cannot be loaded: {error}") from error
    return model, tokenizer


def check_directory(path: str | Path) -> Path:
    """`path` as a directory that holds a config, a tokenizer and safetensors weights.

    Raises:
        UsageError: what is missing, and where.
    """
    if not str(path):
        raise UsageError("model.path is empty: name a Hugging Face model directory")
    directory = Path(path)
    if not directory.is_dir():
        raise UsageError(
            f"model.path {directory} is no directory: download the model or make a small one "
            "with `umbra make-model`"
        )
    if not (directory / "config.json").is_file():
        raise UsageError(f"model.path {directory} has no config.json: not a Hugging Face model")
    if not _has_any(directory, TOKENIZER_FILES):
        raise UsageError(f"model.path {directory} has no tokenizer ({', '.join(TOKENIZER_FILES)})")
    if not _has_any(directory, WEIGHT_FILES):
        raise UsageError(f"model.path {directory} has no weights ({' or '.join(WEIGHT_FILES)})")
    return directory


def export_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: str | Path
) -> Path:
    """Write weights, config, generation config and tokenizer to directory `out`, atomically.

    Everything is written next to `out` first and renamed, so `out` is never half a model; an older
    export at the same place is replaced.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    with no_progress_bars():
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
    if out.exists():
        older = out.with_name(f".{out.name}.{os.getpid()}.old")
        out.rename(older)
        scratch.rename(out)
        shutil.rmtree(older)
    else:
        scratch.rename(out)
    return out


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Silence the bars that Transformers draws when it loads and saves."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _has_any(directory: Path, names: tuple[str, ...]) -> bool:
    return any((directory / name).is_file() for name in names)
