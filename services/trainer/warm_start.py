"""`umbra sft`: supervised warm start on worked examples, before a model learns from rewards.

What the assistant says in them is learned.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import click
import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.model_directory import check_out
from umbra.services.process.files import read_jsonl
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import export_policy, load_policy


class ChatMessage(TypedDict):
    """A message; a chat template may read further keys."""

    role: str
    content: str


class WarmStartResult(NamedTuple):
    """The result of a warm start; losses are in nats per learned token."""

    first_loss: float
    final_loss: float
    seconds: float


def tokenise(
    conversations: Sequence[list[ChatMessage]], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[Tensor, Tensor]]:
    """Return the ids of each conversation, and the positions among them that are learned.

    Raises:
        UsageError: no chat template, or one whose text for a conversation does not begin with its
            text for the first messages of it.
    """
    if not tokenizer.is_fast or tokenizer.chat_template is None:
        raise UsageError("the model needs a fast tokenizer with a chat template")
    rendered = [_render(messages, tokenizer) for messages in conversations]
    # Transformers' own call takes three times as long, for masks that nobody reads.
    backend: Any = tokenizer.backend_tokenizer  # pyright: ignore
    backend.no_truncation()
    backend.no_padding()
    examples: list[tuple[Tensor, Tensor]] = []
    encoded = backend.encode_batch([text for text, _ in rendered], add_special_tokens=False)
    for sequence, (_, spans) in zip(encoded, rendered, strict=True):
        learned = [
            index
            for index, (start, _) in enumerate(sequence.offsets)
            if index and any(low <= start < high for low, high in spans)
        ]
        examples.append((torch.tensor(sequence.ids), torch.tensor(learned, dtype=torch.int64)))
    return examples


def join(examples: Sequence[tuple[Tensor, Tensor]]) -> Tokens:
    """Return the tokens of several examples, as `tokenise` returns them."""
    lengths = torch.tensor([len(ids) for ids, _ in examples])
    starts = lengths.cumsum(0) - lengths
    counts = torch.tensor([len(learned) for _, learned in examples])
    return Tokens(
        ids=torch.cat([ids for ids, _ in examples]),
        lengths=lengths,
        learned=torch.cat([learned for _, learned in examples]) + starts.repeat_interleave(counts),
        owner=torch.arange(len(examples)).repeat_interleave(counts),
    )


def read_conversations(path: str | Path) -> list[list[ChatMessage]]:
    """Read a JSONL file of `{"messages": [{"role": ..., "content": ...}, ...]}`.

    Raises:
        UsageError: unreadable, or a row that is not of that form; it names the row.
    """
    conversations: list[list[ChatMessage]] = []
    for number, row in enumerate(read_jsonl(path), start=1):
        messages: Any = row.get("messages")
        try:
            msgspec.convert(messages, list[ChatMessage])
        except msgspec.ValidationError:
            raise UsageError(
                f'{path}, row {number}: needs "messages", a list of {{"role": ..., "content": ...}}'
            ) from None
        if not any(message["role"] == "assistant" for message in messages):
            raise UsageError(f"{path}, row {number}: no message of the assistant to learn from")
        conversations.append(messages)
    return conversations


def _render(
    messages: list[ChatMessage], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation's text, and the character ranges of it that the assistant said."""

    def text_of(count: int, ask: bool) -> str:
        said: Any = messages[:count]
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=ask)
        assert isinstance(text, str)
        return text

    text = text_of(len(messages), False)
    learned: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prefix = text_of(index, True)
        end = text if index + 1 == len(messages) else text_of(index + 1, False)
        if not (text.startswith(end) and end.startswith(prefix)):
            raise UsageError("the chat template rewrites earlier turns: it can't be learned from")
        learned.append((len(prefix), len(end)))
    return text, learned


def warm_start(
    model_dir: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    steps: int,
    batch: int,
    seed: int,
    config: TrainerConfig,
    report: Callable[[int, float], None] = lambda _step, _loss: None,
    checked: Collection[str] = (),
) -> WarmStartResult:
    """Train the model of `model_dir` on what the assistant says in `data`; write it to `out`.

    Each update takes `batch` examples, in an order that `seed` fixes, and the mean of -log p over
    their learned tokens. `report` gets the number and the loss of each update.

    Raises:
        UsageError: a model, a file or an example that cannot be used; it names which.
    """
    conversations = read_conversations(data)
    model, tokenizer = load_policy(model_dir, "MODEL", checked)
    generator, draws = torch.Generator().manual_seed(seed), list[int]()
    while len(draws) < steps * batch:  # one shuffled pass after the other
        draws += torch.randperm(len(conversations), generator=generator).tolist()
    drawn = sorted(set(draws[: steps * batch]))  # the others need not be tokenised
    tokenised = tokenise([conversations[number] for number in drawn], tokenizer)
    examples = dict(zip(drawn, tokenised, strict=True))
    learner = Learner(model, config, steps)
    begin = time.perf_counter()
    losses: list[float] = []
    for step in range(steps):
        tokens = join([examples[i] for i in draws[step * batch : (step + 1) * batch]])
        ones = torch.ones(len(tokens.learned))
        total = 0.0
        for micro in learner.pack(tokens):
            logprobs, _ = learner.score(micro, ones[micro.source], with_entropy=False)
            loss = -logprobs.sum() / len(tokens.learned)
            learner.backward(loss)
            total += float(loss.detach())
        learner.update(step)
        losses.append(total)
        report(step + 1, total)
    export_policy(learner.model, tokenizer, out, learner.weights())
    return WarmStartResult(losses[0], losses[-1], time.perf_counter() - begin)


@click.command("sft", context_settings={"show_default": True})
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Examples (JSONL).")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory to write.")
@click.option("--steps", type=click.IntRange(1), default=350, help="Updates.")
@click.option("--batch", type=click.IntRange(1), default=64, help="Examples per update.")
@click.option(
    *("--lr", "learning_rate"),
    type=click.FloatRange(0, min_open=True),
    default=3e-3,
    help="Peak learning rate.",
)
@click.option(
    "--schedule",
    type=click.Choice(["constant", "linear", "cosine"]),
    default="constant",
    help="Decay of the learning rate.",
)
@click.option("--seed", type=int, default=0, help="Seed of the order.")
@click.option("--threads", type=click.IntRange(0), default=0, help="CPU threads; 0 = all.")
@click.option("--device", default="auto", help="cpu, cuda or auto.")
@click.option(
    "--checked", multiple=True, metavar="MODEL_TYPE", help="As model.checked of a run file."
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def command(model: Path, data: Path, out: Path, steps: int, as_json: bool, **given: Any) -> None:
    """Warm-start MODEL, a Hugging Face directory, on worked examples.

    Each line of the examples is {"messages": [{"role": ..., "content": ...}, ...]}; what the
    assistant says is learned. An older model at --out is replaced.
    """

    def show(step: int, loss: float) -> None:
        # One line of a terminal, ten of anything else.
        text = f"step {step}/{steps}  loss {loss:.3f}"
        if sys.stderr.isatty():
            click.echo(f"\r{text:<40}", err=True, nl=step == steps)
        elif step * 10 // steps != (step - 1) * 10 // steps:
            click.echo(text, err=True)

    keys = ("learning_rate", "schedule", "threads", "device")
    settings = {key: given.pop(key) for key in keys}
    check_out(out)
    out.mkdir(parents=True, exist_ok=True)  # or nothing is trained
    config = TrainerConfig(pack_tokens=64, micro_tokens=8192, **settings)
    outcome = warm_start(model, data, out, steps=steps, config=config, report=show, **given)
    if as_json:
        click.echo(json.dumps({"out": str(out), "steps": steps, **outcome._asdict()}))
        return
    click.echo(
        f"{out}: loss {outcome.first_loss:.3f} -> {outcome.final_loss:.3f} in {steps} steps, "
        f"{outcome.seconds:.1f} s"
    )
