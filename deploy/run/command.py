"""`umbra up`: start a whole run on this machine."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from umbra.deploy.check.choose import in_one_line, ready
from umbra.deploy.prepare import preflight
from umbra.deploy.report import summary_rows
from umbra.deploy.run.live import View
from umbra.deploy.run.up import Up
from umbra.deploy.run_folder import SIGNALLED, RunFolder
from umbra.deploy.shown import best_effort_output, shown_path
from umbra.proto.errors import ERROR_PREFIX, EXIT_DONE, UsageError
from umbra.proto.sockets import check_port_free
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.config.rules import cautions
from umbra.services.process.child import child_environ
from umbra.services.process.command import SignalCounter
from umbra.services.process.files import named_run
from umbra.services.process.fork_server import ForkServer


@click.command()
@preflight.run_file_argument
@preflight.set_option
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--quiet", is_flag=True, help="Show only the outcome.")
def up(run_file: Path, overrides: tuple[str, ...], as_json: bool, quiet: bool) -> int:
    """Start a whole run on this machine and see it through.

    Starts the buffer, the weight hub, the trainer and the generators of RUN_FILE, restarts
    generators that fail, and ends with a summary. Ctrl-C stops the run in order, a second Ctrl-C at
    once. The exit code is 0 only if the run ended well.

    If RUN_FILE is the folder of a run that was stopped or killed, or its id in runs/, that run goes
    on: from the newest checkpoint, with the very batches that came after it. One that has reached
    its end is trained on with --set run.steps=N. `umbra check RUN_FILE` tries all of it, and starts
    nothing.
    """
    extends = any(text.partition("=")[0].strip() == "run.steps" for text in overrides)
    run_file = named_run(run_file)
    before = RunFolder.existing(run_file, extends=extends) if run_file.is_dir() else None
    with ExitStack() as stack:
        stack.enter_context(best_effort_output())
        if before is not None:
            stack.enter_context(before.held())
            run_file = before.config
        config, tree = preflight.load_given(run_file, overrides)
        extension = check_extension(before, config) if before and before.has_ended() else ""
        config, changes = ready(config, tree)  # before a folder is made
        search = preflight.search_path(run_file)
        for endpoint in preflight.run_endpoints(config):
            check_port_free(endpoint)
        view = View(quiet=quiet, err=as_json)  # stdout is left to the summary
        interrupts = stack.enter_context(SignalCounter())
        folder = before or RunFolder.create(config.run.dir, config.run.name)
        if before is None:
            stack.enter_context(folder.held())
        view.say(in_one_line(config))
        if changes:
            view.say(f"note: chosen for this machine: {', '.join(changes)}")
        for name, text in cautions(config):
            view.say(f"warning: {name}: {text}")
        if extension:
            view.say(f"note: extended: {extension}")
        server = stack.enter_context(ForkServer.where_useful(child_environ(search)))
        run = Up(config, folder, view=view, interrupts=interrupts, search=search, server=server)
        summary = run.run()
        return finish(summary, folder, as_json=as_json)  # while signals are only counted


def check_extension(folder: RunFolder, config: RunConfig) -> str:
    """Return how a finished run goes on; UsageError if it cannot."""
    done = load_config(folder.config, environ={}).run.steps
    if config.run.steps <= done:
        raise UsageError(
            f"the run in {folder.path} has reached its end, step {done}: run.steps = "
            f"{config.run.steps} must be more than that to train on"
        )
    if config.buffer.store == "memory" or not any(folder.checkpoints.glob("step-*")):
        lacks = "store (buffer.store)" if config.buffer.store == "memory" else "checkpoint"
        raise UsageError(
            f"the run in {folder.path} cannot be trained on, because it left no {lacks}: begin "
            f"another one with model.path = {folder.model}"
        )
    return f"{done} steps are done; trainer.schedule spans all {config.run.steps}"


def finish(summary: dict[str, Any], folder: RunFolder, *, as_json: bool) -> int:
    code = int(summary["exit_code"])
    if as_json:
        click.echo(json.dumps(summary))
    else:
        rows = [row for row in summary_rows(summary) if row[0] != "model"]
        paths = {"model": folder.model if summary["model"] else None, "report": folder.report}
        rows += [(name, shown_path(path)) for name, path in paths.items() if path and path.exists()]
        if code > SIGNALLED and folder.config.is_file():
            remedy = f"umbra up {shlex.quote(shown_path(folder.path))}"
            if load_config(folder.config, environ={}).buffer.store == "memory":
                remedy = "it can't: buffer.store = memory; begin another run"
            rows.append(("to go on", remedy))
        for name, value in rows:
            click.echo(f"{name}: {value}")
    if code != EXIT_DONE:
        prefix = "umbra: " if code > SIGNALLED else ERROR_PREFIX  # that was asked for
        click.echo(f"{prefix}{summary['exit_reason']}", err=True)
    return code
