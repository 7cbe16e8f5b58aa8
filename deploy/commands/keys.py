"""The command `umbra keys`."""

from __future__ import annotations

from pathlib import Path

import click

from umbra.proto.access import KEY_ROLES, KeyRole
from umbra.proto.errors import EXIT_DONE
from umbra.proto.net.keys import FOLDER, SECRET, make_keys
from umbra.services.config import RunSection


@click.command()
@click.argument(
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(RunSection().dir) / FOLDER,
)
@click.option(
    "--role",
    "roles",
    type=click.Choice(KEY_ROLES),
    multiple=True,
    help="Only the key of this role.  [default: all]",
)
@click.option("--force", is_flag=True, help="Replace keys that are there.")
def command(folder: Path, roles: tuple[KeyRole, ...], force: bool) -> int:
    """Make the CURVE keys of a run in FOLDER [default: runs/keys], a pair for each role.

    `umbra up` uses runs/keys as it is; everything else is told by --keys FOLDER. A node needs all
    `.key` files, and the `.key_secret` of the roles that run on it and of no other.
    """
    made = make_keys(folder, roles or KEY_ROLES, force=force)
    click.echo(f"{folder}: keys of {', '.join(made)}")
    click.echo(f"each process needs every .key file and the {SECRET} of its own role")
    return EXIT_DONE
