"""`umbra store`: look into a store, or repair one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

_FOLDER = click.argument("directory", type=click.Path(path_type=Path))


@click.group()
def command() -> None:
    """Look into the durable store of a run, or repair a damaged one."""


@command.command()
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--sample", metavar="ID", help="Show the trajectory of this sample.")
def inspect(directory: Path, as_json: bool, sample: str | None) -> None:
    """Counts by state, the oldest samples, or one trajectory."""
    from umbra.services.buffer.store.inspect import StoreReader

    reader = StoreReader(directory)
    found = reader.summary() if sample is None else reader.trajectory(sample)
    if as_json:
        click.echo(json.dumps(found))
        return
    oldest: list[dict[str, Any]] = found.pop("oldest", [])
    for name, value in found.items():
        click.echo(f"{name + ':':16} {_text(value)}")
    if oldest:
        click.echo("oldest samples in flight:")
    for one in oldest:
        holder = f" held by {one['holder']}" if one["holder"] else ""
        click.echo(
            f"  {one['sample']} of {one['group']}: {one['state']}{holder}, attempt {one['attempt']}"
        )


@command.command()
@_FOLDER
def repair(directory: Path) -> None:
    """Drop what is damaged, say what that is, keep the old files beside the new ones."""
    from umbra.services.buffer.store.repair import repair as mend

    for line in mend(directory).tell():
        click.echo(line)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        items: dict[str, Any] = value  # pyright: ignore[reportUnknownVariableType]
        return ", ".join(f"{name} {count}" for name, count in items.items()) or "-"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return "-" if value in ("", None) else str(value)
