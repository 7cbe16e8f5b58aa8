"""The run file of a command, and where modules that it names are looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from umbra.deploy.run_folder import RunFolder
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_tree
from umbra.services.modeling.run_file import located

run_file_argument = click.argument("run_file", type=click.Path(path_type=Path))
set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."
)


def load_given(run_file: Path, overrides: tuple[str, ...]) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration of `run_file` as `located`, and the settings that are given."""
    tree = load_tree(run_file, overrides=overrides)
    return located(msgspec.convert(tree, RunConfig), run_file, note), tree


def note(text: str) -> None:
    click.echo(text, err=True)


def search_path(run_file: Path) -> list[Path]:
    """Return where modules of the user's environment or reward are looked for."""
    folder = RunFolder(run_file.parent)
    if run_file == folder.config and (folders := folder.read_origin().get("search")):
        return [*map(Path, folders), Path.cwd()]
    return list(dict.fromkeys((run_file.resolve().parent, Path.cwd())))
