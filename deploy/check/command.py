"""`umbra check`: what is wrong with a run, whether it fits, and what this machine lacks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from umbra.deploy.check.fit import (
    GPUS,
    Estimate,
    Machine,
    estimate_on,
    gpu_bytes,
    this_machine,
)
from umbra.deploy.check.items import PHASES, Item, Need, peak
from umbra.deploy.check.machine import Verdict, as_text, findings, has_problem, refusal
from umbra.deploy.check.machine_defaults import Hardware, for_hardware, this_hardware
from umbra.deploy.check.nodes import look_at_cluster
from umbra.deploy.check.share import shares_if_any
from umbra.deploy.cluster.cluster_file import load_cluster
from umbra.deploy.files.formats import to_toml
from umbra.deploy.prepare.load import load_run, set_option
from umbra.deploy.prepare.preflight import check_packages, check_run, search_path
from umbra.deploy.prepare.stage import try_start
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.config import RunConfig
from umbra.services.config.cautions import cautions
from umbra.services.config.feasibility import implied_staleness
from umbra.services.config.loader import as_dict, given_keys, load_config, load_tree
from umbra.services.config.objective_rules import implied
from umbra.services.modeling.hub import is_hub_name, missing_bytes
from umbra.services.prompts.download import shown
from umbra.services.reporting.tables import aligned, size

EXIT_PROBLEM = UsageError.exit_code


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path), required=False)
@set_option
@click.option(
    "--cluster", "cluster_file", type=click.Path(path_type=Path), metavar="FILE",
    help="Place the run on the nodes of FILE and try to reach them, instead of this machine.",
)  # fmt: skip
@click.option("--gpu", metavar="KIND", help=f"Only the memory, on GPUs of: {', '.join(GPUS)}.")
@click.option("--memory", is_flag=True, help="Print what takes memory, by process and purpose.")
@click.option("--show", "showing", is_flag=True, help="Only print RUN_FILE as it is understood.")
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON object.")
def command(
    run_file: Path | None,
    overrides: tuple[str, ...],
    cluster_file: Path | None,
    gpu: str | None,
    memory: bool,
    showing: bool,
    json_wanted: bool,
) -> int:
    """Say what is wrong with a run, whether it fits, and what this machine lacks.

    Checks keys, values, files and packages of RUN_FILE; tries its reward or environment on the
    first prompt, its devices and chat template; estimates its memory from the model's config.json;
    and looks at this machine: GPUs, memory, /dev/shm, disk, ports, keys. Without RUN_FILE only the
    machine. Starts nothing. The exit code is 2 if there is a problem.
    """
    if run_file is None:
        if showing or cluster_file or gpu or overrides:
            raise UsageError("--show, --cluster, --gpu and --set are about a run: give RUN_FILE")
        return _finish([], findings(), {}, json_wanted)
    if showing:
        return _show(load_config(run_file, overrides=overrides), json_wanted)
    run, tree = load_run(run_file, overrides), load_tree(run_file, overrides=overrides)
    if gpu is None:
        check_run(run, download=False)
    if cluster_file is not None:
        found = look_at_cluster(load_cluster(cluster_file), run)
        return _finish(_summary(run_file, run, [], None), found, {}, json_wanted)
    machine = this_machine() if gpu is None else Machine(gpu_bytes(gpu), gpu)
    hardware = this_hardware() if gpu is None else Hardware((machine.gpu,), gpu, vllm=True)
    run, chosen = for_hardware(run, given_keys(tree), hardware, shares_if_any)
    found, warnings, estimate = list[Verdict](), cautions(run), None
    try:
        estimate = estimate_on(run, machine)
        found += [refusal("memory", fault) for fault in estimate.faults]
        found += [Verdict("memory", "warning", note, "see --memory") for note in estimate.notes]
    except (UsageError, ModuleNotFoundError) as error:
        found.append(Verdict("memory", "not looked at", str(error)))
    if gpu is None:
        if run.trainer.nodes == 1:
            check_packages(run)
            warnings = try_start(run, search_path(run_file))
        found += findings(run, estimate)
    found += [Verdict(name, "warning", text) for name, text in dict(warnings).items()]
    lines = _summary(run_file, run, chosen, estimate)
    if memory and estimate is not None:
        lines += ["", *_memory(estimate)]
    more = {"chosen": chosen, "estimate": estimate.as_dict() if estimate else None}
    return _finish(lines, found, more, json_wanted)


def _finish(
    lines: list[str], found: list[Verdict], more: dict[str, object], json_wanted: bool
) -> int:
    problem = has_problem(found)
    if json_wanted:
        told = {"ok": not problem, "checks": [asdict(one) for one in found], **more}
        click.echo(json.dumps(told))
    else:
        click.echo("\n".join([*lines, *([""] if lines else []), *as_text(found)]))
    return EXIT_PROBLEM if problem else EXIT_DONE


def _show(run: RunConfig, as_json: bool) -> int:
    """Print the run file with defaults, environment and overrides.

    What trainer.objective stands for is in comments (in JSON: filled in), so that a file made from
    this can still be given another objective by name.
    """
    tree, pieces = as_dict(run), implied(run)
    if as_json:
        tree["trainer"] |= pieces
        click.echo(json.dumps(tree, indent=2))
    else:
        heading = f"objective {run.trainer.objective} means"
        click.echo(to_toml(tree, {"trainer": (heading, pieces)}), nl=False)
    return EXIT_DONE


def _summary(
    run_file: Path, run: RunConfig, chosen: list[str], estimate: Estimate | None
) -> list[str]:
    """Return what the run is, in lines."""
    name = run.model.name
    missing = missing_bytes(name, "model.path") if is_hub_name(name) else 0
    groups, size_ = run.buffer.batch_groups, run.buffer.group_size
    pieces = ", ".join(f"{key} = {value}" for key, value in run.trainer.chosen.items())
    rows = [
        ("model", f"{name}{f' ({size(missing)} to download)' if missing else ''}"),
        ("prompts", shown(run.data.prompts)),
        ("batch", f"{groups} groups of {size_} = {groups * size_}"),
        ("objective", f"{run.trainer.objective}{f' with {pieces}' if pieces else ''}"),
        (
            "staleness",
            f"{implied_staleness(run).describe()} (max_staleness {run.buffer.max_staleness}, "
            f"run_ahead {run.buffer.run_ahead}, minibatches {run.trainer.minibatches}, epochs "
            f"{run.trainer.epochs})",
        ),
    ]
    if chosen:
        rows.append(("chosen", f"{', '.join(chosen)} (for this machine, as the file has none)"))
    if estimate is not None:
        rows.append(("memory", estimate.in_short()))
    return [f"{run_file}: good", *(f"{name + ':':10} {text}" for name, text in rows)]


def _memory(found: Estimate) -> Iterator[str]:
    """Yield the tables of what takes memory, by process and purpose."""
    machine = found.machine
    for need in found.needs:
        yield from _table(need)
        yield ""
    rows = [
        (f"GPU {index}", size(needed), _of(machine.gpu or None, machine.gpu_name))
        for index, needed in sorted(found.gpus.items())
    ]
    rows.append(("host", size(found.host), _of(machine.host)))
    rows.append(("/dev/shm", size(found.arena.bytes), _of(machine.shm)))
    yield from aligned(rows, right={1})


def _of(there: int | None, name: str = "") -> str:
    return "" if there is None else f"of {size(there)}{f' ({name})' if name else ''}"


def _table(need: Need) -> list[str]:
    """Return the lines of a process; what is absent at the time of its peak is in brackets."""
    where = ""
    if need.gpus:
        indices = sorted({index for gpus in need.gpus for index in gpus})
        where = f", GPU {', '.join(map(str, indices))}"
    title = f"{need.name}{f' (x {need.count})' if need.count > 1 else ''}{where}"
    rows: list[tuple[str, str]] = []
    for place, items in (("GPU", need.device), ("host", need.host)):
        if not items:
            continue
        phase = max(PHASES, key=lambda name: sum(i.bytes for i in items if name in i.during))
        rows.append((f"  {place}", size(peak(items))))
        rows += [(f"    {item.name}", _cell(item, phase)) for item in items if item.bytes]
    return [title, *aligned(rows, right={1})]


def _cell(item: Item, phase: str) -> str:
    return size(item.bytes) if phase in item.during else f"({size(item.bytes)})"
