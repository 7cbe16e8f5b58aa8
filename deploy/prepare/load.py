"""The run file of a command: its argument, --set, and the configuration with pinned names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from umbra.deploy.prepare.pinning import pinned
from umbra.deploy.prepare.preflight import resolve_paths
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_tree

run_file_argument = click.argument("run_file", type=click.Path(path_type=Path))
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."
)


def load_run(run_file: Path, overrides: tuple[str, ...]) -> RunConfig:
    """Return the configuration of `run_file` with absolute paths and pinned names.

    Raises:
        UsageError: see `load_tree` and `pinned`.
        StartupError: a model or prompts are elsewhere, and cannot be reached.
    """
    return load_given(run_file, overrides)[0]


def load_given(run_file: Path, overrides: tuple[str, ...]) -> tuple[RunConfig, dict[str, Any]]:
    """Return `load_run`, and the tree of what was given, without defaults."""
    tree = load_tree(run_file, overrides=overrides)
    config = msgspec.convert(tree, RunConfig)
    return pinned(resolve_paths(config, run_file, note), note), tree


def note(text: str) -> None:
    click.echo(text, err=True)
