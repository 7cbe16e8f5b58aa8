"""`umbra doctor`."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click

from umbra.deploy.cluster.bundle import read_plan
from umbra.deploy.command import load_run, set_option
from umbra.deploy.doctor import nodes
from umbra.deploy.doctor.diagnosis import Check, Diagnosis, as_json, as_text, examine, exit_code
from umbra.deploy.doctor.judge import port
from umbra.deploy.doctor.machine import (
    Gpus,
    driver_version,
    installed,
    machine_checks,
    room_checks,
    run_checks,
)
from umbra.proto.errors import UsageError
from umbra.proto.net.keys import FOLDER

LISTEN_S = 60.0
NETWORK_S = 30.0  # for a name that nobody resolves, beyond the time to listen


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path), required=False)
@set_option
@click.option(
    "--plan", "plan_folder", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Of `umbra plan`: look from this node at the others.",
)  # fmt: skip
@click.option("--node", metavar="NAME", help="Which node of the plan this is.  [default: by name]")
@click.option(
    "--listen", is_flag=True, help="Stand in for this node's processes, so that others can look."
)
@click.option(
    "--for", "listen_s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help=f"How long to listen, and to wait for the others.  [default: {LISTEN_S:g}]",
)  # fmt: skip
@click.option("--json", "json_wanted", is_flag=True, help="One JSON object.")
def command(
    run_file: Path | None,
    overrides: tuple[str, ...],
    plan_folder: Path | None,
    node: str | None,
    listen: bool,
    listen_s: float | None,
    json_wanted: bool,
) -> int:
    """Say what is in the way of a run, and what to do.

    Looks at this machine: versions, encryption, driver, GPUs, NCCL, memory, /dev/shm, limits, disk,
    clock; with RUN_FILE also at what its run needs. With --plan, at the ports that this node must
    reach on the other nodes of a plan, and with --listen on all of them at the same time also at
    their clocks and versions. Starts nothing. The exit code is 1 if there is a problem.
    """
    if plan_folder is None and (node or listen):
        raise UsageError("--node and --listen are for the nodes of a plan: give --plan FOLDER")
    if plan_folder is not None and (run_file is not None or overrides):
        raise UsageError("a plan has its run file: leave out RUN_FILE and --set, or --plan")
    if listen_s is not None and not listen:
        raise UsageError("--for says how long to --listen: give that too")
    gpus = Gpus()
    if plan_folder is not None:
        wait_s = (listen_s or LISTEN_S) if listen else 0.0
        found = _look_from(plan_folder, node or "", listen, wait_s)
    elif run_file is not None:
        config = load_run(run_file, overrides)
        checks = [
            *machine_checks(gpus),
            *room_checks(gpus, run_file, overrides),
            *run_checks(config),
        ]
        found = examine(checks)
    else:
        found = examine([*machine_checks(gpus), *room_checks(gpus, None, ())])
    click.echo(json.dumps(as_json(found)) if json_wanted else "\n".join(as_text(found)))
    return exit_code(found)


def _look_from(folder: Path, named: str, listen: bool, wait_s: float) -> list[Diagnosis]:
    """This machine as a node of the plan in `folder`, and the others as seen from it."""
    plan = read_plan(folder, "--plan")
    own = nodes.own_node(plan, named, socket.gethostname())
    here = own["name"]
    keys = next((k for k in (folder / here / FOLDER, folder / FOLDER) if k.is_dir()), None)
    gpus, used = Gpus(), own["gpus"] - len(own["idle_gpus"])
    ranks = [n["name"] for n in plan["nodes"] if any(p["task"] == "train" for p in n["processes"])]
    ports = [number for process in own["processes"] for number in process["ports"]]
    versions = installed() | ({"driver": text} if (text := driver_version()) else {})
    with ExitStack() as stack:
        until, own_ports = time.monotonic() + wait_s, list[Diagnosis]()
        if listen:
            meets = here in ranks and len(ranks) > 1
            listener = stack.enter_context(nodes.Listener(here, versions, ports, meets))
            own_ports = [port(f"tcp://0.0.0.0:{p}", listener.taken.get(p, "")) for p in ports]
        network = partial(_network, plan, here, versions, ranks, until)
        checks = [*machine_checks(gpus, keys, used), *room_checks(gpus, None, ())]
        found = examine([*checks, Check("network", network, 2 * wait_s + 2 * NETWORK_S)])
        while listen and time.monotonic() < until:  # others may still want to look
            time.sleep(min(nodes.RETRY_S, max(0.0, until - time.monotonic())))
    return [*found, *own_ports]


def _network(
    plan: Mapping[str, Any],
    here: str,
    versions: Mapping[str, str],
    ranks: Sequence[str],
    until: float,
) -> list[Diagnosis]:
    wanted = nodes.targets(plan, here)
    if not wanted:
        return [Diagnosis("network", "ok", f"{here} has to reach no other node")]
    greeted: dict[str, nodes.Reached] = {}
    any_port: dict[str, int] = {}

    def look(target: nodes.Target) -> Diagnosis:
        found = nodes.reach(target, until, any_port)
        if found.greeting is not None:
            any_port[target.node] = found.greeting.any_port
            greeted[target.node] = found
        return nodes.judge_reach(target, found, here)

    limit_s = max(0.0, until - time.monotonic()) + NETWORK_S / 2
    checks = {t: Check(f"{here} to {t.node}", partial(look, t), limit_s) for t in wanted}
    # Those at known ports first: they tell the others.
    findings = examine([check for target, check in checks.items() if target.port])
    findings += examine([check for target, check in checks.items() if not target.port])
    others = {t.node: greeted.get(t.node, nodes.Reached("")) for t in wanted}
    told = {node: one.greeting.versions for node, one in others.items() if one.greeting}
    return [
        *findings,
        *nodes.judge_clocks(here, others),
        *nodes.judge_versions(here, versions, told, ranks),
    ]
