"""The run file of a command: its argument, --set, and the configuration with pinned names."""

from __future__ import annotations

from pathlib import Path

import click

from umbra.deploy.prepare.pinning import pinned
from umbra.deploy.prepare.preflight import resolve_paths
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config

run_file_argument = click.argument("run_file", type=click.Path(path_type=Path))
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."
)


def load_run(run_file: Path, overrides: tuple[str, ...]) -> RunConfig:
    """Return the configuration of `run_file` with absolute paths and pinned names.

    Raises:
        UsageError: see `load_config` and `pinned`.
        StartupError: a model or prompts are elsewhere, and cannot be reached.
    """
    config = load_config(run_file, overrides=overrides)
    return pinned(resolve_paths(config, run_file, note), note)


def note(text: str) -> None:
    click.echo(text, err=True)
