"""The policy as a Hugging Face directory: checked before loading, exported whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.modeling.lora import is_adapter
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.models import WeightFiles, open_weights, read_weights
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.process.files import DISK
from umbra.services.trainer.snapshot import bare_name


def load_policy(
    path: str | Path,
    source: str = "model.path",
    checked: Collection[str] = (),
    *,
    trust: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the float32 model (on the CPU) and the tokenizer in directory `path`.

    `source` is the key or flag that the path came from; `checked` are architectures that the user
    vouches for (`check_architecture`); `trust` is of `load_tokenizer`.

    Raises:
        UsageError: it cannot be loaded, a part of it is missing, or Umbra is not right for it.
    """
    directory = check_model_dir(path, source)
    model = read_weights(AutoModelForCausalLM, directory, torch.float32, source, checked)
    return model, load_tokenizer(path, source, trust=trust)


def open_policy(
    path: str | Path,
    source: str = "model.path",
    checked: Collection[str] = (),
    *,
    trust: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, WeightFiles]:
    """Do as `load_policy` without weights; return the files that each rank reads its own rows from.

    Raises:
        UsageError: as `load_policy`, or the trained model could not be written.
    """
    directory = check_model_dir(path, source)
    model, files = open_weights(AutoModelForCausalLM, directory, source, checked)
    tokenizer = load_tokenizer(path, source, trust=trust)
    try:
        with tempfile.TemporaryDirectory() as trial:
            model.config.save_pretrained(trial)
            _write_rest(model, tokenizer, Path(trial))
    except (OSError, TypeError, ValueError) as error:
        raise UsageError(f"{source}: {path} can be read, but not saved: {error}") from error
    return model, tokenizer, files


def write_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write weights, config, generation config and tokenizer to `directory`.

    `weights` are written instead of the model's own, which may be sharded, or a base and an
    adapter. The umask decides who may read them: safetensors itself lets their owner alone.

    Raises:
        OSError, SafetensorError: they cannot be written.
    """
    transformers_logging.disable_progress_bar()
    config = model.generation_config
    model.generation_config = GenerationConfig()  # a strict check would refuse configs in use
    try:
        model.save_pretrained(directory, state_dict=weights)
    finally:
        model.generation_config = config
    _write_rest(model, tokenizer, directory)
    for file in directory.glob("*.safetensors"):
        shutil.copymode(directory / "config.json", file)


def _write_rest(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path
) -> None:
    """Write tokenizer and generation config, this one as it was read, also if it is invalid."""
    if isinstance(model.generation_config, GenerationConfig):
        model.generation_config.to_json_file(directory / GENERATION_CONFIG_NAME)
    tokenizer.save_pretrained(directory)


def export_policy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path,
    weights: dict[str, Tensor] | None = None,
) -> Path:
    """Do as `write_policy`, to directory `out`, whole or not.

    Raises:
        UmbraError: the disk is full, say; an older export is as it was.
    """
    with written_whole(Path(out)) as scratch:
        write_policy(model, tokenizer, scratch, weights)
    return Path(out)


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """Yield a folder to write a model to, which is `out` afterwards; an older one is replaced.

    Raises UmbraError if the disk is full, say; an older one is as it was.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch, older = (out.with_name(f".{out.name}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    try:
        yield scratch
        DISK.sync_tree(scratch)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise UmbraError(
            f"the model cannot be written to {out}: {error}: make room there, or choose another "
            "place"
        ) from error
    if out.exists():
        shutil.rmtree(older, ignore_errors=True)
        out.rename(older)
    scratch.rename(out)
    shutil.rmtree(older, ignore_errors=True)
    DISK.sync_directory(out.parent)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the parameters another dtype; buffers stay as they are, and tied weights tied."""
    _change(model, lambda tensor: tensor.to(dtype) if isinstance(tensor, nn.Parameter) else tensor)


def place(model: nn.Module, device: torch.device, *, parameters_at: torch.device) -> None:
    """Bring `model`, sharded or not, to its devices; tensors of the meta device have no values yet.

    Buffers go to `device`, parameters, or this rank's rows of them, to `parameters_at`.
    """

    def moved(tensor: Tensor) -> Tensor:
        target = parameters_at if isinstance(tensor, nn.Parameter) else device
        return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor.to(target)

    _change(model, moved)


def _change(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change all tensors; parameters that are tied stay one under all their names."""
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    model._apply(change)
    for first, *aliases in tied.values():
        for alias in aliases:
            module, _, attribute = alias.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))


@torch.no_grad()
def read(
    model: nn.Module, files: WeightFiles, into: Callable[[nn.Parameter], Tensor] = lambda p: p
) -> None:
    """Read this rank's rows of every weight and stored buffer; adapters keep theirs.

    `into` says which tensor, sharded like it, is filled for a parameter.

    Raises:
        UsageError: a file cannot be read, or is of another model.
    """
    stored = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    weights = {n: into(p).detach() for n, p in model.named_parameters() if not is_adapter(n)}
    files.read({bare_name(name): place for name, place in (weights | buffers).items()})
