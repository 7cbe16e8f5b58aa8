"""Configuration and tokenizer of a Hugging Face directory, which need no torch."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umbra.proto.errors import UmbraError, UsageError
from umbra.services.modeling.architectures import architecture, in_the_way
from umbra.services.modeling.chat_template import end_of_turn
from umbra.services.modeling.model_directory import check_model_dir

if TYPE_CHECKING:
    from transformers import GenerationConfig

AS_IT_IS: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options to read a directory with Transformers: fetch nothing, and run no code in it."""


def import_without_torch() -> None:
    """Import Transformers as where torch is missing, unless this process has one of them already.

    Configurations and tokenizers need none of it, and its import takes more than twice as long as
    all else of `umbra check`. Transformers then never sees torch in this process.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        return
    quiet = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # that models can't be loaded
    previous = {quiet: os.environ[quiet]} if quiet in os.environ else {}
    os.environ[quiet] = "1"
    sys.modules["torch"] = None  # pyright: ignore - for importlib: there is no such module
    try:
        importlib.import_module("transformers").utils.is_torch_available()
    finally:
        del sys.modules["torch"], os.environ[quiet]
        os.environ |= previous


def torch_is_hidden() -> bool:
    loaded = sys.modules.get("transformers")
    return loaded is not None and not loaded.utils.is_torch_available()


def read_transformers_config(directory: Path) -> Any:
    """Read the config in `directory`; raise UsageError if Umbra would get a default wrong."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, **AS_IT_IS)
    if config.model_type in ("nemotron_h", "zamba2"):
        # In whole sequences these classes raise shorter steps to it, in decoding nothing does.
        config.time_step_min = 1e-30
    filled = config.to_dict()
    if fault := in_the_way(filled):
        raise UsageError(f"{directory} is a {architecture(filled)}, which {fault}")
    return config


def read_generation(directory: Path, config: Any) -> GenerationConfig:
    """Return the generation config that the model in `directory`, of `config`, has once loaded."""
    from transformers import GenerationConfig

    if (directory / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    return GenerationConfig.from_model_config(config)


@contextmanager
def loading(directory: Path, source: str, what: str = "") -> Iterator[None]:
    """Raise a UsageError of one sentence if Transformers fails to read `directory`."""
    try:
        yield
    except UmbraError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{source}: {what}{directory} cannot be loaded: {reason}") from error


def load_tokenizer(path: str | Path, source: str = "model.path", *, trust: bool = False) -> Any:
    """Load the tokenizer in `path`, a model directory or a name on the hub.

    `trust`: run Python code that the model brings for its tokenizer (model.trust_remote_code).
    Raises UsageError if there is none, or it is code that is not trusted.
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
        from transformers import AutoTokenizer

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
    """Return the tokens that end a turn, of generation config, tokenizer and chat template.

    Raises UsageError if there are none, so that no turn would ever end.
    """
    configured = getattr(model.generation_config, "eos_token_id", None)
    named = configured if isinstance(configured, list) else [configured]
    ids = frozenset({*named, tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None})
    if not ids:
        raise UsageError(f"{tokenizer.name_or_path}: neither tokenizer nor model name an eos token")
    return ids


def named_tokens(tokenizer: Any, texts: Iterable[str]) -> frozenset[int]:
    """Return the tokens of `sampling.stop_tokens`; UsageError for a text that is not one."""
    ids: set[int] = set()
    for text in texts:
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(tokens) != 1:
            raise UsageError(
                f"sampling.stop_tokens: {text!r} is {len(tokens)} tokens of "
                f"{tokenizer.name_or_path}; name texts of exactly one"
            )
        ids.update(tokens)
    return frozenset(ids)
