"""The policy as a Hugging Face directory: checked before loading, exported whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.runtime.disk import DISK
from umbra.services.runtime.model_dir import check_model_dir


def load_policy(
    path: str | Path, source: str = "model.path"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The float32 model (SDPA attention, on the CPU) and the tokenizer in directory `path`.

    `source` is the key or flag that the path came from, for errors.

    Raises:
        UsageError: no such directory, a part of it is missing, or it cannot be loaded.
    """
    directory = check_model_dir(path, source)
    with _loading(directory, source):
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    return _load(AutoModelForCausalLM, directory, source), tokenizer


def load_backbone(path: str | Path, source: str) -> PreTrainedModel:
    """The float32 transformer in directory `path` without its output layer.

    Raises:
        UsageError: as `load_policy`; it needs no tokenizer.
    """
    return _load(AutoModel, check_model_dir(path, source, tokenizer=False), source)


def _load(kind: Any, directory: Path, source: str) -> PreTrainedModel:
    with _loading(directory, source):
        model: PreTrainedModel = kind.from_pretrained(
            directory,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="sdpa",
        )
    layers = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"}:
        raise UsageError(
            f"{source}: {directory} has layers of type {', '.join(sorted(layers))}; packed rows "
            "need full attention in all of them"
        )
    return model


@contextmanager
def _loading(directory: Path, source: str) -> Iterator[None]:
    try:
        with no_progress_bars():
            yield
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise UsageError(f"{source}: {directory} cannot be loaded: {error}") from error


def export_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    """Write weights, config, generation config and tokenizer to directory `out`, atomically.

    Everything is written next to `out` first and renamed, so `out` is never half a model; an older
    export at the same place is replaced. `weights` are written instead of the model's own, which
    may be sharded, or a base and an adapter.

    Raises:
        UmbraError: the disk is full, say; an older export is as it was.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        with no_progress_bars():
            model.save_pretrained(scratch, state_dict=weights)
            tokenizer.save_pretrained(scratch)
        DISK.sync_tree(scratch)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UmbraError(
            f"the model cannot be written to {out}: {error}: make room there, or choose another "
            "place"
        ) from error
    if out.exists():
        older = out.with_name(f".{out.name}.{os.getpid()}.old")
        out.rename(older)
        scratch.rename(out)
        shutil.rmtree(older)
    else:
        scratch.rename(out)
    DISK.sync_directory(out.parent)
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
