"""The chat templates that TRL ships, each with a small tokenizer that has its special tokens."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from umbra.services.environments.protocol import tool_schema

# The tokens that end a turn of the models that a template is of, by the beginning of its name; as
# in the generation configs of these models.
_ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "lfm2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "muse_glimmer": ("<|eot|>",),
    "nemotron": ("<|im_end|>",),
    "phi3": ("<|end|>",),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
}
_SPECIAL = re.compile(r"<\|[^|>\s]{1,40}\|?>|<[^|<>\s]{1,30}\|>|<｜[^>]*?｜>|</?(?:think|s)>")
# As Llama 3 and Qwen split text before merging.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def template_names(*, training: bool = False) -> list[str]:
    """Those that models ship, or TRL's own variants for training.

    Templates of some vision models are left out: they take lists of parts only.
    """
    vision = ("idefics3", "llava_next", "smolvlm")
    stems = sorted(path.stem for path in _folder().glob("*.jinja"))
    return [s for s in stems if not s.startswith(vision) and s.endswith("_training") == training]


def chat_tokenizer(name: str) -> tuple[Any, set[int]]:
    """A byte-level tokenizer with merges that has template `name`, and the tokens that end turns.

    What the template writes between bars or brackets are tokens of their own, as in the model.
    """
    text = (_folder() / f"{name}.jinja").read_text(encoding="utf-8")
    ends = _ENDS[max((key for key in _ENDS if name.startswith(key)), key=len)]
    special = sorted({*_SPECIAL.findall(text), *ends, "<bos>"})
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = re.sub(_SPECIAL, " ", text)
    bpe.train_from_iterator(
        [words, "\n\n\n", "The answer is 42.\n"],
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<bos>", eos_token=ends[0], name_or_path=name
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = text
    ids: list[int] = tokenizer.convert_tokens_to_ids(list(ends))  # pyright: ignore[reportAssignmentType]
    return tokenizer, set(ids)


def _folder() -> Path:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "chat_templates"


def weather(**properties: Any) -> dict[str, Any]:
    """Return the schema of a tool that tells the weather."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return tool_schema("weather", "The weather of a city.", parameters)
