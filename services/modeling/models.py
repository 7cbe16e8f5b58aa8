"""Loading a Hugging Face directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from umbra.proto.errors import StartupError, UmbraError, UsageError
from umbra.services.config.rules import device_fault
from umbra.services.modeling.architectures import architecture, check_architecture, in_the_way
from umbra.services.modeling.chat_template import end_of_turn
from umbra.services.modeling.model_directory import check_model_dir
from umbra.services.modeling.weight_files import NotByRowsError, WeightFiles
from umbra.services.process.versions import driver_version

AS_IT_IS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options to read a directory with Transformers: fetch nothing, and run no code in it."""


log = logging.getLogger(__name__)


def _sees_gpu(key: str) -> bool:
    if torch.cuda.is_available():
        return True
    if driver_version():  # a CPU would take days without a word
        raise StartupError(
            "there is an NVIDIA driver, but torch sees no GPU: `umbra check` says why; to compute "
            f"on the CPU, set {key} to cpu"
        )
    return False


def pick_device(device: str, key: str = "device") -> torch.device:
    """Return the torch device for what `key` names, a GPU with its number; "auto" takes one.

    Raises:
        UsageError: an unknown name, or a GPU that is not there.
        StartupError: see `_sees_gpu`.
    """
    if device == "auto":
        return torch.device("cuda", 0) if _sees_gpu(key) else torch.device("cpu")
    if fault := device_fault(device, key, torch.cuda.device_count()):
        raise UsageError(fault)
    chosen = torch.device(device)
    return chosen if chosen.type == "cpu" else torch.device("cuda", chosen.index or 0)


def load_model(
    path: str | Path,
    device: torch.device,
    dtype: torch.dtype,
    source: str = "model.path",
    checked: Collection[str] = (),
) -> Any:
    """Load the causal language model in `path`, and make its GPU the current one."""
    directory = check_model_dir(path, source)
    model: Any = read_weights(AutoModelForCausalLM, directory, dtype, source, checked)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # what takes a thread's current device takes this one
    return model.to(device).eval()


def read_weights(
    kind: Any,
    directory: Path,
    dtype: torch.dtype,
    source: str,
    checked: Collection[str] = (),
    config: Any = None,
) -> PreTrainedModel:
    """Load the model in `directory` to the CPU, with an attention that computes all it asks for.

    `kind` is `AutoModelForCausalLM`, or `AutoModel` for one without its output layer; `config` is
    Transformers', in place of the one in `directory`. For `source` and `checked` see
    `check_architecture`.

    Raises:
        UsageError: it cannot be loaded, or Umbra is not right for it; see `check_architecture`,
            also for `source` and `checked`.
    """
    check_architecture(directory, source, checked)
    transformers_logging.disable_progress_bar()
    with loading(directory, source):
        config = config or read_transformers_config(directory)
        return kind.from_pretrained(
            directory,
            config=config,
            **AS_IT_IS,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation=attention_implementation(config),
        )


def read_transformers_config(directory: Path) -> Any:
    """Read the config in `directory`; raise UsageError if Umbra would get a default wrong."""
    config = AutoConfig.from_pretrained(directory, **AS_IT_IS)
    if config.model_type in ("nemotron_h", "zamba2"):
        # In whole sequences these classes raise shorter steps to it, in decoding nothing does.
        config.time_step_min = 1e-30
    filled = config.to_dict()
    if fault := in_the_way(filled):
        raise UsageError(f"{directory} is a {architecture(filled)}, which {fault}")
    return config


def attention_implementation(config: Any) -> str:
    """Return Transformers' name of the fastest attention that is right for the model of `config`.

    Its SDPA drops a soft cap on scores without a word; classes that have learned sinks don't
    offer it.
    """
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    classes = AutoModelForCausalLM._model_mapping
    model = classes[type(config)] if type(config) in classes else None
    return "sdpa" if getattr(model, "_supports_sdpa", False) and not capped else "eager"


@contextmanager
def loading(directory: Path, source: str, what: str = "") -> Iterator[None]:
    """Raise a UsageError of one sentence if Transformers fails to read `directory`."""
    try:
        yield
    except (UmbraError, NotByRowsError):
        raise
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{source}: {what}{directory} cannot be loaded: {why}") from error


def outline_model(
    path: str | Path, source: str = "model.path", checked: Collection[str] = ()
) -> Any:
    directory = check_model_dir(path, source, weights=False)
    return _outline(AutoModelForCausalLM, directory, source, checked)


def open_weights(
    kind: Any, directory: Path, source: str, checked: Collection[str] = ()
) -> tuple[PreTrainedModel, WeightFiles | None]:
    """Return the model that `read_weights` gives, on the meta device, and its files.

    A model that cannot be read by rows is loaded whole, and has no files.
    """
    model = _outline(kind, directory, source, checked, dtype=torch.float32)
    try:
        with loading(directory, source):
            return model.eval(), WeightFiles(directory, model, source)
    except NotByRowsError as error:
        log.warning("%s: every rank loads the whole of %s: %s", source, directory, error)
    return read_weights(kind, directory, torch.float32, source, checked), None


def _outline(kind: Any, directory: Path, source: str, checked: Collection[str], **how: Any) -> Any:
    check_architecture(directory, source, checked)
    with loading(directory, source):
        config = read_transformers_config(directory)
        how = {**how, "attn_implementation": attention_implementation(config)}
        with torch.device("meta"):
            model = kind.from_config(config, trust_remote_code=False, **how)
        if model.can_generate() and (directory / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(directory, local_files_only=True)
            model.generation_config = generation
    return model


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the repeated blocks of `model`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers: list[torch.nn.Module] = []
    within: set[torch.nn.Module] = set()
    for module in model.modules():
        # A sharded module is of a class that FSDP derives from the model's own.
        if module not in within and any(c.__name__ in names for c in type(module).__mro__):
            layers.append(module)
            within.update(module.modules())
    if not layers:
        raise UsageError(
            f"model.path: {type(model).__name__} does not say what its layers are, so it can "
            "neither be sharded nor compiled nor recomputed by layers"
        )
    return layers


def load_tokenizer(path: str | Path, source: str = "model.path", *, trust: bool = False) -> Any:
    """Load the tokenizer in `path`, a model directory or a name on the hub.

    `trust`: run Python code that the model brings for its tokenizer (model.trust_remote_code).

    Raises:
        UsageError: there is none, or it is code that is not trusted.
    """
    directory = check_model_dir(path, source, weights=False, code=trust)
    if not trust and (code := _tokenizer_code(directory)):
        # Transformers would quietly take a class of its own instead, which may cut up text
        # in another way.
        raise UsageError(
            f"{source}: the tokenizer of {path} is Python code that it brings ({code}): read that, "
            "and if you trust it set model.trust_remote_code = true, or choose another model"
        )
    with loading(directory, source, "the tokenizer in "):
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust
        )


def _tokenizer_code(directory: Path) -> str:
    try:
        config = json.loads((directory / "tokenizer_config.json").read_bytes())
        named = config.get("auto_map", {}).get("AutoTokenizer") or ()
    except (OSError, ValueError, AttributeError):
        return ""
    return ", ".join(filter(None, [named] if isinstance(named, str) else named))


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a turn: of generation config, tokenizer and chat template.

    Raises:
        UsageError: there are none, so that no turn would ever end.
    """
    config: GenerationConfig | None = model.generation_config
    configured = config.eos_token_id if config is not None else None
    ids: set[int] = {configured} if isinstance(configured, int) else set(configured or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if (end := end_of_turn(tokenizer)) is not None:
        ids.add(end)
    if not ids:
        raise UsageError(f"{tokenizer.name_or_path}: neither tokenizer nor model name an eos token")
    return frozenset(ids)


def named_tokens(tokenizer: Any, texts: Iterable[str]) -> frozenset[int]:
    """Return the tokens that `sampling.stop_tokens` names.

    Raises:
        UsageError: a text that is not exactly one token.
    """
    ids: set[int] = set()
    for text in texts:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(found) != 1:
            raise UsageError(
                f"sampling.stop_tokens: {text!r} is {len(found)} tokens of "
                f"{tokenizer.name_or_path}; name texts of exactly one"
            )
        ids.update(found)
    return frozenset(ids)
