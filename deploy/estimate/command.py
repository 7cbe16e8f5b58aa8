"""`umbra estimate`: what a run needs, by process and purpose, and whether it fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click

from umbra.deploy.command import load_run, run_file_argument, set_option
from umbra.deploy.estimate.fit import Estimate, Machine
from umbra.deploy.estimate.gpus import GIB, GPUS, gpu_bytes
from umbra.deploy.estimate.here import estimate_on, this_machine
from umbra.deploy.estimate.items import PHASES, Item, Need, peak
from umbra.deploy.estimate.share import shares_if_any
from umbra.deploy.machine_defaults import Hardware, for_hardware, this_hardware
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.config.loader import given_keys, load_tree
from umbra.services.reporting.tables import aligned, size


@click.command()
@run_file_argument
@set_option
@click.option("--gpu", metavar="KIND", help=f"GPUs of that kind: {', '.join(GPUS)}.")
@click.option("--host-gib", type=click.FloatRange(0, min_open=True), help="Memory of the host.")
@click.option("--shm-gib", type=click.FloatRange(0, min_open=True), help="Size of its /dev/shm.")
@click.option("--json", "as_json", is_flag=True, help="Print the estimate as one JSON object.")
def command(
    run_file: Path,
    overrides: tuple[str, ...],
    gpu: str | None,
    host_gib: float | None,
    shm_gib: float | None,
    as_json: bool,
) -> int:
    """Tell how much memory the run of RUN_FILE needs, and whether it fits.

    For each trainer rank, generator and scorer: on its GPU and in host memory, by purpose; for the
    host: memory and /dev/shm. Of the model only config.json is read. All is taken to be on one
    host, as `umbra up` starts it: this one, or with --gpu one with such GPUs, whose memory is
    judged if it is given. What the run file leaves open is chosen as `umbra up` would there, with
    one such GPU and vLLM. The exit code is 2 if the run does not fit.
    """
    machine = this_machine() if gpu is None else Machine(gpu_bytes(gpu), gpu)
    hardware = this_hardware() if gpu is None else Hardware((machine.gpu,), gpu, vllm=True)
    config, given = load_run(run_file, overrides), load_tree(run_file, overrides=overrides)
    config, chosen = for_hardware(config, given_keys(given), hardware, shares_if_any)
    if host_gib is not None or shm_gib is not None:
        machine = Machine(
            machine.gpu,
            machine.gpu_name,
            machine.host if host_gib is None else int(host_gib * GIB),
            machine.shm if shm_gib is None else int(shm_gib * GIB),
        )
    found = estimate_on(config, machine)
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    else:
        if chosen:
            click.echo(f"Chosen for that machine: {', '.join(chosen)}\n")
        click.echo("\n".join(_text(found)))
    if not found.fits:
        raise UsageError("; ".join(found.faults))
    return EXIT_DONE


def _text(found: Estimate) -> Iterator[str]:
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
    yield from found.notes
    if found.gpus and not machine.gpu:
        yield "There is no GPU here: name the kind that is meant with --gpu."
    elif found.fits:
        yield "It fits."


def _of(there: int | None, name: str = "") -> str:
    return "" if there is None else f"of {size(there)}{f' ({name})' if name else ''}"


def _table(need: Need) -> list[str]:
    """What a process needs; what is not there at the time of its peak is in brackets."""
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
