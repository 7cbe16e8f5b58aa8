"""A small Qwen3 with random weights and a character tokenizer, made without any download.

It is an ordinary Hugging Face directory: what works on it works on a real model of that family.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from umbra.proto.errors import UsageError
from umbra.services.trainer.policy import write_policy

PAD, USER, ASSISTANT, END, UNKNOWN = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unk|>"
SPECIAL_TOKENS = (PAD, USER, ASSISTANT, END, UNKNOWN)
# Printable ASCII and the newline: 96 characters, one token each.
CHARACTERS = "".join(chr(code) for code in range(32, 127)) + "\n"

# `{% generation %}` marks what the assistant said, its end token included.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}"
    "<|user|>{{ message['content'] }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(
    out: str | Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    ff: int = 192,
    context: int = 1024,
    init_std: float = 0.05,
    seed: int = 0,
) -> int:
    """Write a model with random weights to `out` and return its number of parameters.

    The same arguments give the same weights; the caller's random state is left alone.

    Raises:
        UsageError: sizes that do not fit together, or `out` holds something already.
    """
    if hidden % heads or (hidden // heads) % 2:
        raise UsageError(
            f"--hidden {hidden} --heads {heads}: hidden must be an even multiple of heads"
        )
    if heads % kv_heads:
        raise UsageError(f"--heads {heads} --kv-heads {kv_heads}: heads must be a multiple of it")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists and is not empty: remove it or name another directory")
    tokenizer = make_tokenizer(context)
    pad, end = SPECIAL_TOKENS.index(PAD), SPECIAL_TOKENS.index(END)
    ends: dict[str, Any] = {"pad_token_id": pad, "eos_token_id": end}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=init_std,
        tie_word_embeddings=True,
        **ends,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    write_policy(model, tokenizer, out)
    return model.num_parameters()


def make_tokenizer(context: int = 1024) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per character; text comes back as it went in."""
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens=[USER, ASSISTANT],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


@click.command("make-model", context_settings={"show_default": True})
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--hidden", type=click.IntRange(2), default=64, help="Width.")
@click.option("--layers", type=click.IntRange(1), default=2, help="Layers.")
@click.option("--heads", type=click.IntRange(1), default=4, help="Query heads.")
@click.option("--kv-heads", type=click.IntRange(1), default=2, help="Key/value heads.")
@click.option("--ff", type=click.IntRange(1), default=192, help="Feed-forward width.")
@click.option("--context", type=click.IntRange(8), default=1024, help="Longest sequence.")
@click.option(
    "--init-std",
    type=click.FloatRange(0, min_open=True),
    default=0.05,
    help="Standard deviation of the initial weights.",
)
@click.option("--seed", type=int, default=0, help="Seed of the weights.")
def command(out: Path, **sizes: int) -> None:
    """Write a small model with random weights to the directory OUT.

    OUT becomes an ordinary Hugging Face model directory: a Qwen3 with tied embeddings and a
    tokenizer of one token per printable ASCII character.
    """
    click.echo(f"{out}: {make_model(out, **sizes):,} parameters")
