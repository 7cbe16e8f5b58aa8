"""`umbra sft`: supervised warm start on worked examples, before a model learns from rewards."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from umbra.services.config import TrainerConfig

if TYPE_CHECKING:
    import torch


class WarmStartProgress(NamedTuple):
    """After `step` updates of `steps`: the loss of the last one, in nats per learned token."""

    step: int
    steps: int
    loss: float


class WarmStartResult(NamedTuple):
    """What a warm start came to."""

    steps: int
    examples: int
    first_loss: float
    final_loss: float
    tokens: int
    seconds: float


def warm_start(
    model_dir: str | Path,
    data: str | Path,
    out: str | Path,
    *,
    steps: int,
    batch: int,
    seed: int,
    config: TrainerConfig,
    report: Callable[[WarmStartProgress], None] = lambda _: None,
    checked: Collection[str] = (),
) -> WarmStartResult:
    """Train the model of `model_dir` on what the assistant says in `data`; write it to `out`.

    Each update takes `batch` examples, in an order that `seed` fixes, and the mean of
    -log p over their learned tokens. For `checked` see `check_architecture`.

    Raises:
        UsageError: a model, a file or an example that cannot be used; it names which.
    """
    import torch

    from umbra.services.modeling.packing import pack
    from umbra.services.trainer.demonstrations import Demonstrations, read_conversations
    from umbra.services.trainer.learner import Learner
    from umbra.services.trainer.policy import export_policy, load_policy

    conversations = read_conversations(data)
    model, tokenizer = load_policy(model_dir, "MODEL", checked)
    # Only what is drawn at least once is tokenised.
    draws = _draws(len(conversations), steps * batch, torch.Generator().manual_seed(seed))
    used = sorted(set(draws))
    place = {which: index for index, which in enumerate(used)}
    examples = Demonstrations([conversations[which] for which in used], tokenizer)
    learner = Learner(model, config, steps)
    begin = time.perf_counter()
    losses: list[float] = []
    count = 0
    for step in range(steps):
        chosen = [place[which] for which in draws[step * batch : (step + 1) * batch]]
        tokens = examples.take(chosen)
        ones = torch.ones(len(tokens.learned))
        total = 0.0
        for micro in pack(tokens, **learner.rows._asdict()):
            logprobs, _ = learner.score(micro, ones[micro.source], with_entropy=False)
            loss = -logprobs.sum() / len(tokens.learned)
            learner.backward(loss)
            total += float(loss.detach())
        learner.update(step)
        losses.append(total)
        count += len(tokens.ids)
        report(WarmStartProgress(step + 1, steps, total))
    export_policy(learner.model, tokenizer, out, learner.weights())
    return WarmStartResult(
        steps, len(conversations), losses[0], losses[-1], count, time.perf_counter() - begin
    )


def _draws(size: int, count: int, generator: torch.Generator) -> list[int]:
    """`count` indices below `size`: one shuffled pass after the other."""
    import torch

    drawn: list[int] = []
    while len(drawn) < count:
        drawn += torch.randperm(size, generator=generator).tolist()
    return drawn[:count]


class _Display:
    """Progress on standard error: one line rewritten on a terminal, ten plain lines elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown_at = 0.0

    def __call__(self, progress: WarmStartProgress) -> None:
        step, steps, loss = progress
        text = f"step {step}/{steps}  loss {loss:.3f}"
        if self._terminal:
            if step == steps or time.monotonic() - self._shown_at > 0.1:
                self._shown_at = time.monotonic()
                click.echo(f"\r{text}", err=True, nl=step == steps)
        elif step * 10 // steps != (step - 1) * 10 // steps:
            click.echo(text, err=True)


@click.command("sft")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="Examples (JSONL).")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory to write.")
@click.option("--steps", type=click.IntRange(1), default=350, show_default=True, help="Updates.")
@click.option(
    "--batch", type=click.IntRange(1), default=64, show_default=True, help="Examples per update."
)
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    default=3e-3,
    show_default=True,
    help="Peak learning rate.",
)
@click.option(
    "--schedule",
    type=click.Choice(["constant", "linear", "cosine"]),
    default="constant",
    show_default=True,
    help="Decay of the learning rate.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the order.")
@click.option(
    "--threads", type=click.IntRange(0), default=0, show_default=True, help="CPU threads; 0 = all."
)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda or auto.")
@click.option(
    "--checked", multiple=True, metavar="MODEL_TYPE", help="As model.checked of a run file."
)
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as one JSON object.")
def command(
    model: Path,
    data: Path,
    out: Path,
    steps: int,
    batch: int,
    lr: float,
    schedule: str,
    seed: int,
    threads: int,
    device: str,
    checked: tuple[str, ...],
    as_json: bool,
) -> None:
    """Warm-start MODEL, a Hugging Face directory, on worked examples.

    Each line of the examples is {"messages": [{"role": ..., "content": ...}, ...]}; what the
    assistant says is learned. An older model at --out is replaced.
    """
    config = TrainerConfig(
        learning_rate=lr,
        schedule=schedule,  # pyright: ignore[reportArgumentType]  # click has checked it
        threads=threads,
        device=device,
        pack_tokens=64,
        micro_tokens=8192,
    )
    outcome = warm_start(
        model,
        data,
        out,
        steps=steps,
        batch=batch,
        seed=seed,
        config=config,
        report=_Display(),
        checked=checked,
    )
    if as_json:
        click.echo(json.dumps({"out": str(out), **outcome._asdict()}))
    else:
        click.echo(
            f"{out}: loss {outcome.first_loss:.3f} -> {outcome.final_loss:.3f} in "
            f"{outcome.steps} steps, {outcome.seconds:.1f} s"
        )
