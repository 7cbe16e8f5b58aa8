"""`umbra plan`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from umbra.deploy.cluster.bundle import FORMATS, Bundle
from umbra.deploy.cluster.cluster_file import load_cluster
from umbra.deploy.cluster.invocation import modules_of
from umbra.deploy.cluster.kubernetes import keys_command
from umbra.deploy.cluster.plan import make_plan
from umbra.deploy.cluster.table import as_json as plan_as_json
from umbra.deploy.cluster.table import table
from umbra.deploy.files.run_folder import new_run_id
from umbra.deploy.prepare.load import load_run, run_file_argument, set_option
from umbra.proto.errors import EXIT_DONE
from umbra.proto.net.keys import FOLDER, make_keys
from umbra.services.config import RunConfig
from umbra.services.config.rules import check_feasible


@click.command()
@click.argument("cluster_file", type=click.Path(path_type=Path))
@run_file_argument
@set_option
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("plan"), show_default=True,
    help="Folder that receives the files.",
)  # fmt: skip
@click.option(
    "--format", "formats", multiple=True, type=click.Choice(FORMATS), default=("compose",),
    show_default=True, help="What to render; may be given several times.",
)  # fmt: skip
@click.option("--run-id", help="Id of the run.  [default: <run.name>-<date>-<time>-<4 digits>]")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
def command(
    cluster_file: Path,
    run_file: Path,
    overrides: tuple[str, ...],
    out: Path,
    formats: tuple[str, ...],
    run_id: str | None,
    as_json: bool,
    dry_run: bool,
) -> int:
    """Plan the run of RUN_FILE on the nodes of CLUSTER_FILE, and render what starts it there.

    Writes a folder per node with a compose file, an environment file and the run's configuration;
    or a script for SLURM, or manifests for Kubernetes. Paths in RUN_FILE must be good on the nodes.
    """
    cluster = load_cluster(cluster_file)
    config = load_run(run_file, overrides)
    plan = make_plan(cluster, config, run_id or new_run_id(config.run.name))
    check_feasible(plan.config)
    modules, keys = modules_of(config, run_file), _keys(config, out)
    bundle = Bundle(plan, modules, out.resolve(), keys)
    files = bundle.render(formats)
    click.echo(json.dumps(plan_as_json(plan), indent=2) if as_json else table(plan), nl=as_json)
    if not dry_run:
        bundle.write(files)
        _make_missing_keys(config, keys)
        if "compose" in formats:
            bundle.copy_keys()
        click.echo(f"{len(files)} files written to {out}", err=as_json)
        if "kubernetes" in formats and keys:
            click.echo(f"the keys: {keys_command(plan, str(keys))}", err=as_json)
        if modules and keys and set(formats) != {"slurm"}:
            _note_keys_in_sight(Path(modules), (keys, out.resolve()))
    return EXIT_DONE


def _keys(config: RunConfig, out: Path) -> Path | None:
    """Return the folder of the run's keys: the run file's, or one of the plan's own."""
    if config.security.insecure and not config.security.keys:
        return None
    return Path(config.security.keys) if config.security.keys else out.resolve() / FOLDER


def _make_missing_keys(config: RunConfig, keys: Path | None) -> None:
    """Make the plan's own keys, if it needs any and does not have them from before."""
    if keys is not None and not config.security.keys and not keys.exists():
        make_keys(keys)


def _note_keys_in_sight(modules: Path, places: tuple[Path, ...]) -> None:
    """Print a note if a folder with secret keys is where the containers import from."""
    if seen := next((str(place) for place in places if place.is_relative_to(modules)), ""):
        click.echo(
            f"note: containers that import your modules see all of {modules}, and with it secret "
            f"keys of other roles in {seen}: choose another --out or security.keys",
            err=True,
        )
