"""The commands of this service: `umbra generator`, `make-task` and `eval`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from umbra.proto.errors import UsageError
from umbra.services.config.loader import ORIGIN, load_config, read_run_file
from umbra.services.generator.tasks import VERIFIERS, write_task
from umbra.services.modeling.run_file import load_service
from umbra.services.process.command import ServiceContext, service_command
from umbra.services.process.files import named_run
from umbra.services.process.parent import SEARCH_VARIABLE
from umbra.services.prompts import read_source
from umbra.services.reporting import shown_scores

DEMOS = 22_400  # of our own tasks
_SOME = click.IntRange(1)

if TYPE_CHECKING:
    from umbra.services.generator.evaluate import EvalResult


def _run(ctx: ServiceContext) -> int:
    from umbra.services.generator.service import run  # brings torch

    return run(ctx)


command = service_command("generator", _run, load=load_service)


@click.command("make-task")
@click.argument("task")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory to write.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draws.")
@click.option("--prompts", type=_SOME, default=8192, show_default=True, help="Training prompts.")
@click.option("--heldout", type=_SOME, default=1024, show_default=True, help="Held-out prompts.")
@click.option("--demos", type=click.IntRange(0), help=f"Worked examples.  [default: {DEMOS}, or 0]")
@click.option("--environment", default="", help="The one of [[environments]] that rows are for.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="environment.options, for verifiers:ID.",
)
def make_task(
    task: str,
    out: Path,
    environment: str,
    options: tuple[str, ...],
    demos: int | None,
    **counts: int,
) -> None:
    """Write the data of TASK: prompts.jsonl, heldout.jsonl and demos.jsonl.

    sort: sort a list of digits. guess: find a digit in four tries, told only higher or lower.
    verifiers:ID: tasks of an environment or taskset of verifiers, without demos.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: name a directory")
    is_library = task.startswith(VERIFIERS)
    if options and not is_library:
        raise UsageError(f"--option is for {VERIFIERS}ID, not for {task}")
    if demos and is_library:
        raise UsageError(f"--demos: {task} has none")
    if demos is None:
        demos = 0 if is_library else DEMOS
    overrides = [f"environment.options.{option}" for option in options]
    read = load_config(overrides=overrides, environ={}).environment.options
    written = write_task(task, out, **counts, demos=demos, options=read, environment=environment)
    click.echo(f"{out}: " + ", ".join(f"{rows:,} rows in {file}" for file, rows in written.items()))


@click.command("eval")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--prompts", help="As eval.prompts, with eval.columns.  [default: from --config]")
@click.option("--config", help="Run file of environment, sampling and generator; engine: torch.")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key.")
@click.option("--samples", type=_SOME, help="Samples drawn.  [default: one per prompt]")
@click.option("--greedy", is_flag=True, help="Take the most likely token instead of sampling.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(
    model: Path,
    prompts: str | None,
    config: str | None,
    sets: tuple[str, ...],
    samples: int | None,
    greedy: bool,
    as_json: bool,
) -> None:
    """Measure the accuracy (mean reward) of MODEL on held-out prompts.

    MODEL is a directory, ORG/NAME[@REVISION] on the hub, or a run that has ended (its folder, or
    its id in runs/).
    """
    model = named_run(model)
    if (model / "metrics.jsonl").is_file():  # a run's folder
        config, model = config or str(model / "config.json"), model / "model"
        if not model.is_dir():
            raise UsageError(f"the run in {model.parent} has no trained model: it has not ended")
        file = model.parent / ORIGIN
        search = (read_run_file(file, "the run's") if file.is_file() else {}).get("search", [])
        sys.path.extend(search)
        os.environ[SEARCH_VARIABLE] = os.pathsep.join(search)  # of its processes
    settings = load_service(config, overrides=sets)
    if not (prompts := prompts or settings.eval.prompts):
        raise UsageError("give --prompts FILE, or a --config with eval.prompts")
    source = read_source(prompts, columns=settings.eval.columns, section="eval")
    rows = [prompt.row for prompt in source]
    from umbra.services.generator.evaluate import evaluate_model  # brings torch

    result = evaluate_model(model, rows, settings, samples=samples or len(rows), greedy=greedy)
    decoding = "greedy" if greedy else f"temperature {settings.sampling.temperature:g}"
    click.echo(json.dumps(asdict(result)) if as_json else _sentence(result, decoding))


def _sentence(result: EvalResult, decoding: str) -> str:
    failed = f", {result.failed} of them failed" if result.failed else ""
    scores = [f"{name} {value:.4f}, " for name, value in shown_scores(result.scores).items()]
    return (
        f"accuracy {result.accuracy:.4f} ({decoding}, {result.samples:,} samples{failed}); "
        f"{''.join(scores)}"
        f"{result.mean_tokens:.1f} tokens in {result.mean_turns:.2f} turns on average, "
        f"{result.tokens_per_s:,.0f} tokens/s"
    )
