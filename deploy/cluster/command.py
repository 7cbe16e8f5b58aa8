"""`umbra plan`: a plan as a table, and as the files that start it; and `umbra keys`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

import click

from umbra.deploy.cluster.cluster_file import load_cluster
from umbra.deploy.cluster.containers import KEYS_FOLDER, compose_files, keys_command, manifests
from umbra.deploy.cluster.launch import container_paths, launches, modules_of, ports
from umbra.deploy.cluster.plan import Plan, make_plan
from umbra.deploy.cluster.slurm import slurm_files
from umbra.deploy.prepare.preflight import load_given, run_file_argument, set_option
from umbra.deploy.run_folder import new_run_id
from umbra.proto.access import KEY_ROLES
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.proto.net.keys import FOLDER, SECRET, make_keys
from umbra.services.config import RunSection
from umbra.services.config.loader import as_dict, to_toml
from umbra.services.reporting import aligned

NEXT = {
    "compose": "copy {out}/NODE to each node and run there: docker compose up -d",
    "slurm": "sbatch {out}/run.sbatch",
    "kubernetes": "kubectl apply -f {out}/kubernetes.yaml",
}


@click.command()
@click.argument("cluster_file", type=click.Path(path_type=Path))
@run_file_argument
@set_option
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("plan"), show_default=True,
    help="Folder that receives the files.",
)  # fmt: skip
@click.option(
    "--format", "formats", multiple=True, type=click.Choice(list(NEXT)), default=("compose",),
    show_default=True, help="What to render; may be given several times.",
)  # fmt: skip
@click.option("--run-id", help="Id of the run.  [default: <run.name>-<date>-<time>-<4 digits>]")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
def command(
    cluster_file: Path,
    run_file: Path,
    overrides: tuple[str, ...],
    out: Path,
    formats: tuple[str, ...],
    run_id: str | None,
    dry_run: bool,
) -> int:
    """Plan the run of RUN_FILE on the nodes of CLUSTER_FILE, and render what starts it there.

    Writes a folder per node with a compose file, an environment file and the run's configuration;
    or a script for SLURM, or manifests for Kubernetes. Paths in RUN_FILE must be good on the nodes.
    """
    cluster = load_cluster(cluster_file)
    config, _ = load_given(run_file, overrides)
    plan = make_plan(cluster, config, run_id or new_run_id(config.run.name))
    modules, security, target = modules_of(config, run_file), config.security, out.resolve()
    folder = None if security.insecure else target / FOLDER
    folder = Path(security.keys) if security.keys else folder
    files = render(plan, formats, modules, target, folder)
    click.echo(table(plan), nl=False)
    if dry_run:
        return EXIT_DONE
    write(files, target)
    if folder and not security.keys and not folder.exists():  # the same in every plan of `out`
        make_keys(folder)
    if folder and "compose" in formats:
        copy_keys(plan, folder, target)
    click.echo(f"{len(files)} files written to {out}")
    if folder and "kubernetes" in formats:
        click.echo(f"make the secret of the keys: {keys_command(plan, shlex.quote(str(folder)))}")
    for name in formats:
        click.echo(f"next: {NEXT[name].format(out=shlex.quote(str(out)))}")
    if folder and modules and set(formats) != {"slurm"}:
        if exposed := [place for place in (folder, target) if place.is_relative_to(modules)]:
            click.echo(
                f"note: containers that import your modules see all of {modules}, and with it "
                f"secret keys of other roles in {exposed[0]}: set another --out or security.keys",
                err=True,
            )
    return EXIT_DONE


@click.command()
@click.argument(
    "folder", type=click.Path(path_type=Path, file_okay=False),
    default=Path(RunSection().dir) / FOLDER,
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace keys that are there.")
def keys(folder: Path, force: bool) -> int:
    """Make the CURVE keys of a run in FOLDER [default: runs/keys], a pair for each role.

    `umbra up` uses runs/keys as it is; everything else needs --keys FOLDER. A node needs all
    `.key` files, and the `.key_secret` of the roles that run on it and of no other.
    """
    make_keys(folder, force=force)
    click.echo(f"{folder}: keys of {', '.join(KEY_ROLES)}")
    click.echo(f"each process needs every .key file and the {SECRET} of its own role")
    return EXIT_DONE


def render(
    plan: Plan, formats: Collection[str], modules: str, out: Path, keys: Path | None
) -> dict[str, str]:
    """Return the texts of `formats` by path below `out`; UsageError for plans they can't express.

    `modules` is the folder of the user's own Python modules, or empty; `keys` that of the run's.
    """
    tree = as_dict(plan.config)
    tree["security"]["keys"] = ""  # the nodes' environment says where they are
    config, paths = to_toml(tree), container_paths(plan, modules, keys=keys is not None)
    files: dict[str, str] = {}
    if "compose" in formats:
        files |= compose_files(plan, paths, config)
    if "slurm" in formats:
        files |= slurm_files(plan, config, out=out, keys=keys, modules=modules)
    if "kubernetes" in formats:
        files["kubernetes.yaml"] = manifests(plan, paths, config)
    return files


def write(files: dict[str, str], out: Path) -> None:
    for name, text in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def copy_keys(plan: Plan, keys: Path, out: Path) -> None:
    """Put into each node's folder the keys that it needs, readable by their user alone."""
    user, group = plan.cluster.owner
    if os.geteuid() not in (0, user):
        raise UsageError(
            f"cluster.user is {user}:{group}, and only root can give keys to another user: leave "
            f"it out (then it is you, {os.geteuid()}:{os.getegid()}), or plan as root"
        )
    needed: dict[Path, set[str]] = {}
    for launch in launches(plan, container_paths(plan, "", keys=True)):
        folder = out / launch.process.node.name / KEYS_FOLDER
        needed.setdefault(folder, set()).update(launch.key_files)
    for folder, names in needed.items():
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chown(folder, user, -1)
            for name in sorted(names):
                path = folder / name
                path.unlink(missing_ok=True)
                path.touch(mode=0o600, exist_ok=False)
                path.write_bytes((keys / name).read_bytes())
                os.chown(path, user, -1)
        except OSError as error:
            raise UsageError(
                f"cannot copy the run's keys from {keys} to {folder}: {error.strerror}: "
                f"{error.filename}; `umbra keys` makes them"
            ) from error


def table(plan: Plan) -> str:
    """Return the plan as columns, with the idle rest, and below it each group's share."""
    rows: list[tuple[str, ...]] = [("node", "address", "GPUs", "process", "task", "ports")]
    for node in plan.nodes:
        processes, idle = plan.on(node), plan.idle(node)
        for process in processes:
            numbers, task = _numbers(ports(plan, process)), process.task.replace("_", "-")
            gpus = _numbers(process.gpus)
            rows.append((node.name, node.address, gpus, process.name, task, numbers))
        if idle or not processes:
            rows.append((node.name, node.address, _numbers(idle), "-", "idle", "-"))
    lines = [*aligned(rows), "", *(f"{g.describe()}: {g.arithmetic}" for g in plan.groups)]
    trainers, trainer = plan.trainers(), plan.config.trainer
    if len(trainers) > 1:
        names = ", ".join(process.node.name for process in trainers)
        lines.append(
            f"trainer: {trainer.ranks} ranks on {names}, which meet at {trainer.rendezvous}; they "
            "connect with each other at any port"  # which firewalls have to know
        )
    return "\n".join(lines) + "\n"


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values)) or "-"
