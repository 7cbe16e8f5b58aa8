"""The commands `umbra up` and `umbra config`."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from umbra.deploy.config_page import config_page
from umbra.deploy.live import LogView, choose_view
from umbra.deploy.machine_defaults import for_this_machine
from umbra.deploy.pinning import pinned
from umbra.deploy.preflight import (
    check_one_machine,
    check_packages,
    check_ports_free,
    check_run,
    resolve_paths,
    search_path,
)
from umbra.deploy.programs import buffer_program, other_programs
from umbra.deploy.run_folder import RunFolder
from umbra.deploy.shown import print_facts, shown_command, shown_path
from umbra.deploy.summary import summary_rows
from umbra.deploy.toml import to_toml
from umbra.deploy.trial import try_aside
from umbra.deploy.up import Up
from umbra.proto.errors import ERROR_PREFIX, EXIT_DONE, UsageError
from umbra.services.buffer.prompts import first_rows
from umbra.services.config import RunConfig
from umbra.services.config.cautions import cautions
from umbra.services.config.feasibility import implied_staleness
from umbra.services.config.learning_rate import after_extension
from umbra.services.config.loader import as_dict, load_config, load_tree
from umbra.services.config.objective_rules import implied
from umbra.services.modeling.hub import is_hub_name, missing_bytes
from umbra.services.process.signals import SignalCounter
from umbra.services.prompts.download import shown
from umbra.services.reporting.tables import size

SIGNALLED = 128  # exit codes above it are of signals

run_file_argument = click.argument("run_file", type=click.Path(path_type=Path))
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."
)


def load_run(run_file: Path, overrides: tuple[str, ...]) -> RunConfig:
    """The configuration of `run_file` with absolute paths, and pinned names of what is elsewhere.

    Raises:
        UsageError: see `load_config` and `pinned`.
        StartupError: a model or prompts are elsewhere, and cannot be reached.
    """
    config = load_config(run_file, overrides=overrides)
    return pinned(resolve_paths(config, run_file, _note), _note)


def _note(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@run_file_argument
@set_option
@click.option("--no-eval", is_flag=True, help="Don't measure the model before and after.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--quiet", is_flag=True, help="Show only the outcome.")
@click.option("--logs", is_flag=True, help="Show the logs of all processes as they come.")
@click.option("--dry-run", is_flag=True, help="Check all, print what would be started, and end.")
def up(
    run_file: Path,
    overrides: tuple[str, ...],
    no_eval: bool,
    as_json: bool,
    quiet: bool,
    logs: bool,
    dry_run: bool,
) -> int:
    """Start a whole run on this machine and see it through.

    Starts the buffer, the weight hub, the trainer and the generators of RUN_FILE, restarts
    generators that fail, and ends with a summary. Ctrl-C stops the run in order, a second Ctrl-C at
    once. The exit code is 0 only if the run ended well.

    If RUN_FILE is the folder of a run that was stopped or killed, that run goes on: from the newest
    checkpoint, with the very batches that came after it. One that has reached its end is trained on
    with --set run.steps=N.
    """
    extends = any(text.partition("=")[0].strip() == "run.steps" for text in overrides)
    before = RunFolder.existing(run_file, extends=extends) if run_file.is_dir() else None
    with ExitStack() as stack:
        if before is not None:
            stack.enter_context(before.held())
            run_file = before.config
        config = load_run(run_file, overrides)
        told = check_extension(before, config) if before is not None and before.has_ended() else ""
        check_one_machine(config)
        if not dry_run and (missing := _to_download(config)):
            _note(f"model: {size(missing)} of weights to download")
        check_run(config, download=not dry_run)  # before a folder is made
        config, chosen = for_this_machine(config, load_tree(run_file, overrides=overrides))
        check_packages(config)
        search = _search_path(run_file, before)
        if dry_run:
            warnings = _try_all(config, search)
            code = _print_programs(config)
            _echo_warnings(warnings, err=True)
            _echo_chosen(chosen)
            return code
        check_ports_free(config)
        view = choose_view(quiet=quiet, as_json=as_json)
        interrupts = stack.enter_context(SignalCounter())
        folder = before or RunFolder.create(config.run.dir, config.run.name)
        if before is None:
            stack.enter_context(folder.held())
        if logs:
            view = LogView(view, folder)
        if chosen:
            view.say(f"note: chosen for this machine: {', '.join(chosen)}")
        for name, text in [*cautions(config), *([("extended", told)] if told else [])]:
            view.say(f"{'note' if text is told else 'warning'}: {name}: {text}")
        try:
            run = Up(
                config,
                folder,
                view=view,
                interrupts=interrupts,
                search=search,
                evaluate=not no_eval,
            )
            summary = run.run()
        finally:
            view.close()
        return finish(summary, folder, as_json=as_json)  # while signals are only counted


def _try_all(config: RunConfig, search: list[Path]) -> list[tuple[str, str]]:
    """Try what `umbra up` and its processes would at their start; the warnings.

    Raises:
        UsageError: something is missing or does not fit; names it.
        ChildError: the environment cannot be used.
    """
    try_aside(config, search)
    from umbra.services.generator.checks import check_chat, check_devices  # bring torch

    check_devices(config)
    row = next(iter(first_rows(config.data, config.environments).values()))
    cut = check_chat(config, row)
    return [*cautions(config), *([("max_tokens", cut)] if cut else [])]


def check_extension(folder: RunFolder, config: RunConfig) -> str:
    """Whether a run that has reached its end can be trained on; what its learning rate then does.

    Raises:
        UsageError: it can't; says why.
    """
    done = load_config(folder.config, environ={}).run.steps
    if config.run.steps <= done:
        raise UsageError(
            f"the run in {folder.path} has reached its end, step {done}: run.steps = "
            f"{config.run.steps} must be more than that to train on"
        )
    if config.buffer.store == "memory" or not any(folder.checkpoints.glob("step-*")):
        missing = "store (buffer.store)" if config.buffer.store == "memory" else "checkpoint"
        raise UsageError(
            f"the run in {folder.path} cannot be trained on, because it left no {missing}: begin "
            f"another one with model.path = {folder.model}"
        )
    return f"{done} steps are done; {after_extension(config.trainer, done, done, config.run.steps)}"


def _echo_chosen(chosen: list[str]) -> None:
    if chosen:
        click.echo(f"chosen:    {', '.join(chosen)} (for this machine, as the run file has none)")


def _echo_warnings(warnings: list[tuple[str, str]], *, err: bool = False) -> None:
    for name, text in dict(warnings).items():
        click.echo(f"warning:   {name}: {text}", err=err)


def _print_programs(config: RunConfig) -> int:
    """The commands of the run, in the order in which they start."""
    folder = RunFolder(Path(config.run.dir).resolve() / f"{config.run.name}-...")
    programs = [
        buffer_program(config, folder),
        *other_programs(config, folder, config.run.broker),
    ]
    for program in programs:
        click.echo(f"{program.name}: {shlex.join(program.argv)}")
    return EXIT_DONE


def _search_path(run_file: Path, before: RunFolder | None) -> list[Path]:
    if before is None:
        return search_path(run_file)
    return [*map(Path, before.read_origin().get("search", [])), Path.cwd()]


def finish(summary: dict[str, Any], folder: RunFolder, *, as_json: bool) -> int:
    """Print the outcome; the exit code."""
    code = int(summary["exit_code"])
    if as_json:
        click.echo(json.dumps(summary))
    else:
        rows = [row for row in summary_rows(summary) if row[0] != "model"]
        print_facts([*rows, *_left(summary, folder), *_how_to_go_on(code, folder)])
    if code != EXIT_DONE:
        prefix = "umbra: " if code > SIGNALLED else ERROR_PREFIX  # that was asked for
        click.echo(f"{prefix}{summary['exit_reason']}", err=True)
    return code


def _how_to_go_on(code: int, folder: RunFolder) -> list[tuple[str, str]]:
    """What to type after a run was stopped by a signal."""
    if code <= SIGNALLED or not folder.config.is_file():
        return []
    if load_config(folder.config, environ={}).buffer.store == "memory":
        return [("to go on", "it can't: buffer.store = memory; begin another run")]
    return [("to go on", f"{shown_command()} up {shlex.quote(shown_path(folder.path))}")]


def _left(summary: dict[str, Any], folder: RunFolder) -> list[tuple[str, str]]:
    """What there is to look at, from here."""
    left = {"model": folder.model if summary["model"] else None, "report": folder.report}
    return [(name, shown_path(path)) for name, path in left.items() if path and path.exists()]


@click.group()
def config() -> None:
    """Check and show a run file."""


@config.command()
@run_file_argument
@set_option
def check(run_file: Path, overrides: tuple[str, ...]) -> int:
    """Check RUN_FILE, and try what `umbra up` would: nothing is left, and nothing is started.

    Keys, values, files, packages and devices; the model's chat template; and the reward or
    environment, which is called once on the first prompt with an empty response. A run of several
    trainer hosts is checked without what has to be on those: packages, devices and environment.
    """
    run, chosen = load_run(run_file, overrides), list[str]()
    check_run(run, download=False)
    if run.trainer.nodes > 1:
        warnings = list(cautions(run))
    else:
        run, chosen = for_this_machine(run, load_tree(run_file, overrides=overrides))
        check_packages(run)
        warnings = _try_all(run, search_path(run_file))
    batch = run.buffer.group_size * run.buffer.batch_groups
    click.echo(f"{run_file}: good")
    missing = _to_download(run)
    click.echo(f"model:     {run.model.name}{f' ({size(missing)} to download)' if missing else ''}")
    click.echo(f"prompts:   {shown(run.data.prompts)}")
    click.echo(f"batch:     {run.buffer.batch_groups} groups of {run.buffer.group_size} = {batch}")
    click.echo(f"objective: {run.trainer.objective}{_changes(run)}")
    click.echo(
        f"staleness: {implied_staleness(run).describe()} (max_staleness "
        f"{run.buffer.max_staleness}, run_ahead {run.buffer.run_ahead}, minibatches "
        f"{run.trainer.minibatches}, epochs {run.trainer.epochs})"
    )
    _echo_chosen(chosen)
    _echo_memory(run)
    _echo_warnings(warnings)
    return EXIT_DONE


def _to_download(run: RunConfig) -> int:
    """Bytes of the model's weights that are still on the hub alone."""
    name = run.model.name
    return missing_bytes(name, "model.path") if is_hub_name(name) else 0


def _echo_memory(run: RunConfig) -> None:
    """Print what the run needs of this machine, or where it does not fit."""
    from umbra.deploy.estimate.here import estimate_on, this_machine  # brings torch

    try:
        found = estimate_on(run, this_machine())
    except (UsageError, ModuleNotFoundError) as error:
        click.echo(f"memory:    not estimated: {error}")
        return
    click.echo(f"memory:    {found.in_short()}")
    for fault in found.faults:
        click.echo(f"warning:   memory: {fault}")


def _changes(run: RunConfig) -> str:
    chosen = ", ".join(f"{key} = {value}" for key, value in run.trainer.chosen.items())
    return f" with {chosen}" if chosen else ""


@config.command()
def keys() -> None:
    """Print every key with its meaning, default and unit, as Markdown (docs/config.md)."""
    click.echo(config_page(), nl=False)


@config.command()
@run_file_argument
@set_option
@click.option("--json", "as_json", is_flag=True, help="As JSON instead of TOML.")
def show(run_file: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Print RUN_FILE as it is understood: defaults, environment and overrides included.

    What trainer.objective stands for is in comments (in JSON: filled in), so that a file made from
    this can still be given another objective by name.
    """
    run = load_config(run_file, overrides=overrides)
    tree, pieces = as_dict(run), implied(run)
    if as_json:
        tree["trainer"] |= pieces
        click.echo(json.dumps(tree, indent=2))
    else:
        heading = f"objective {run.trainer.objective} means"
        click.echo(to_toml(tree, {"trainer": (heading, pieces)}), nl=False)
    return EXIT_DONE
