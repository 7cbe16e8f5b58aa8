"""`umbra demo`: a tiny model learns a verifiable task on this machine's CPU, start to finish."""

from __future__ import annotations

import math
import shlex
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import click
from msgspec.structs import replace

from umbra.deploy.prepare.preflight import check_run, set_option
from umbra.deploy.prepare.stage import StageInterrupted, Stages
from umbra.deploy.run.command import finish
from umbra.deploy.run.live import View
from umbra.deploy.run.up import Up
from umbra.deploy.run_folder import RunFolder, StepFollower
from umbra.deploy.shown import best_effort_output, shown_path
from umbra.proto.errors import EXIT_DONE
from umbra.services.config.loader import as_dict, load_config, to_toml
from umbra.services.generator.tasks import write_task
from umbra.services.modeling.run_file import located
from umbra.services.monitor.view import sparkline
from umbra.services.process.child import child_environ
from umbra.services.process.command import SignalCounter
from umbra.services.process.fork_server import ForkServer

DEMOS = Path(__file__).parents[1] / "demos"


class Recipe(NamedTuple):
    prompts: int
    demos: int
    sft_steps: int
    sft_schedule: str


RECIPES = {
    # Decay to nothing: at a constant rate the base would end anywhere from 0.19 to 0.35.
    "sort": Recipe(prompts=16_384, demos=22_400, sft_steps=350, sft_schedule="linear"),
    "guess": Recipe(prompts=2_048, demos=6_400, sft_steps=100, sft_schedule="constant"),
}
HELDOUT = 1024


def run_demo(
    task: str,
    seed: int,
    folder: RunFolder,
    view: View,
    interrupts: SignalCounter,
    overrides: tuple[str, ...],
    server: ForkServer | None = None,
) -> dict[str, Any]:
    """Make model and data in `folder`, then run like any other run; return its summary.

    Buffer and weight hub start, and environment and model are tried, during the warm start.
    """
    start, recipe, data = time.monotonic(), RECIPES[task], folder.path / "task"
    random, base = str(folder.path / "random"), str(folder.path / "base")
    stages = Stages(folder, child_environ(), interrupts, server)
    seed_flag = ("--seed", str(seed))
    view.say(f"task {task}: prompts, held-out prompts, worked examples ...")
    write_task(task, data, seed=seed, prompts=recipe.prompts, heldout=HELDOUT, demos=recipe.demos)
    run_file = folder.path / "run.toml"
    keys = (
        f"run.seed={seed}",
        f"run.dir={folder.path.parent}",
        f"model.path={base}",
        f"data.prompts={data / 'prompts.jsonl'}",
        f"eval.prompts={data / 'heldout.jsonl'}",
    )
    config = load_config(DEMOS / f"{task}.toml", overrides=(*keys, *overrides))
    run_file.write_text(to_toml(as_dict(config)), encoding="utf-8")
    config = located(config, run_file)
    view.say("model: random weights, character tokenizer ...")
    stages.run("make-model", "make-model", random, *seed_flag)
    view.say(f"warm start: {recipe.sft_steps} supervised steps on a poor teacher ...")
    warm_start_began = time.monotonic()
    warm_start = stages.begin(
        "sft",
        *("sft", random, "--data", str(data / "demos.jsonl"), "--out", base, *seed_flag),
        *("--steps", str(recipe.sft_steps), "--schedule", recipe.sft_schedule),
        *("--threads", "1", "--device", "cpu"),
    )

    def model_made() -> bool:
        if done := stages.has_ended("sft", warm_start):
            view.say(f"warm start: {time.monotonic() - warm_start_began:.1f} s")
        return done

    how: dict[str, Any] = {"view": view, "interrupts": interrupts, "server": server}
    how |= {"started": start, "model_made": model_made, "stand_in": random}
    try:
        check_run(replace(config, model=replace(config.model, path=random)))
        return Up(config, folder, **how).run()
    finally:
        warm_start.kill()
        warm_start.wait(math.inf)


@click.command()
@click.option(
    "--task", type=click.Choice(list(RECIPES)), default="sort", show_default=True,
    help="What to learn.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of everything.")
@click.option(
    "--dir", "parent", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
    help="Folder that receives the demo's own.",
)  # fmt: skip
@set_option
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--quiet", is_flag=True, help="Show only the outcome.")
def command(
    task: str, seed: int, parent: Path, overrides: tuple[str, ...], as_json: bool, quiet: bool
) -> int:
    """Train a tiny model on this machine's CPU, with every process and socket of a real run.

    Makes a model and a task, warm-starts the model on worked examples of a poor teacher, then runs
    the asynchronous loop. sort: sort a list of digits. guess: find a digit in four tries.
    """
    load_config(DEMOS / f"{task}.toml", overrides=overrides)  # a typo should show at once
    with best_effort_output(), SignalCounter() as interrupts, ExitStack() as stack:
        server = stack.enter_context(ForkServer.where_useful(child_environ()))
        view = View(quiet=quiet, err=as_json)
        folder = RunFolder.create(parent, f"demo-{task}")
        stack.enter_context(folder.held())
        view.say(f"everything goes to {folder.path}")
        try:
            summary = run_demo(task, seed, folder, view, interrupts, overrides, server)
        except StageInterrupted:
            click.echo("umbra: interrupted", err=True)
            return interrupts.exit_code
        code = finish(summary, folder, as_json=as_json)
        if code == EXIT_DONE and not as_json:
            print_next(folder)
        return code


def print_next(run: RunFolder) -> None:
    """Print what to do next, and the curve of the reward."""
    click.echo("\nwhat the figures mean: docs/operate.md; next: open the report in a browser, or")
    click.echo(f"  umbra runs {shlex.quote(shown_path(run.path))} --worst  # what earned little")
    click.echo("  umbra init my-run  # a model and prompts of your own")
    rewards = [float(row.get("reward/mean") or 0.0) for row in StepFollower(run.metrics).new()]
    if rewards:
        curve = f"{rewards[0]:.2f} {sparkline(rewards)} {rewards[-1]:.2f}"
        click.echo(f"\nmean reward of steps 1 to {len(rewards)}: {curve}")
