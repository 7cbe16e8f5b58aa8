"""`umbra simulate`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from umbra.deploy.simulator.compare import COLOCATED, modes, simulate, sweep
from umbra.deploy.simulator.prediction import Prediction
from umbra.deploy.simulator.push import all_times, cells, columns, load_push
from umbra.deploy.simulator.scenario import load_scenario
from umbra.deploy.simulator.search import Choice, best, search
from umbra.deploy.simulator.table import compared, report
from umbra.proto.errors import EXIT_DONE, UsageError
from umbra.services.reporting.tables import aligned


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."
)
@click.option("--seed", type=int, help="Of lengths and failures (run.seed).")
@click.option("--sweep", "sweeps", is_flag=True, help="Find the best split between the roles.")
@click.option(
    "--search", "searches", is_flag=True,
    help="Find division of GPUs, run-ahead and bound on staleness: the freshest nearly as fast.",
)  # fmt: skip
@click.option("--compare", "compares", is_flag=True, help="Set synchronous modes beside this run.")
@click.option(
    "--push", "pushes", is_flag=True,
    help="Only how long pushes of large models take; FILE has unit costs.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    file: Path,
    overrides: tuple[str, ...],
    seed: int | None,
    sweeps: bool,
    searches: bool,
    compares: bool,
    pushes: bool,
    as_json: bool,
) -> int:
    """Predict a run on the machines of FILE, without them.

    The production broker and push protocol are driven by simulated processes in simulated time. The
    file says how long things take: docs/scale.md has all keys, and what was predicted with it.

    With --push FILE has the costs of a push: results of benchmarks/weight_push.py, or TOML.
    """
    if sweeps + searches + compares + pushes > 1:
        raise UsageError("--sweep, --search, --compare and --push are several tables: ask for one")
    if pushes:
        if seed is not None:
            raise UsageError("--seed has no effect with --push: leave it out")
        tables = load_push(file, overrides)
        times = all_times(tables)
        rows = [columns(tables), *map(cells, times)]
        text = "\n".join(aligned(rows, right=range(1, len(rows[0]) - 1))) + "\n"
        told = json.dumps(msgspec.to_builtins({"costs": tables.costs, "pushes": times}), indent=2)
        click.echo(told if as_json else text, nl=as_json)
        return EXIT_DONE
    if seed is not None:
        overrides = (*overrides, f"run.seed={seed}")
    scenario = load_scenario(file, overrides)
    chosen: Choice | None = None
    if sweeps:
        predictions = {f"{gpus} GPUs train": run for gpus, run in sweep(scenario)}
        fastest = max(predictions, key=lambda name: predictions[name].samples_per_s)
        text = compared(predictions, fastest, "split") + f"\nbest: {fastest}\n"
    elif searches:
        tried = list(search(scenario))
        chosen = best(tried)
        predictions = {str(one): run for one, run in tried}
        text = compared(predictions, str(chosen), "use") + f"\nbest: {chosen}\n"
    elif compares:
        predictions = dict(modes(scenario))
        text = compared(predictions, COLOCATED, "mode")
    else:
        predictions = {"run": simulate(scenario)}
        if scenario.tables.failures:
            predictions["without failures"] = simulate(scenario.without_failures())
        text = report(predictions["run"], predictions.get("without failures"))
    click.echo(_json(predictions, chosen) if as_json else text, nl=as_json)
    return EXIT_DONE


def _json(predictions: dict[str, Prediction], chosen: Choice | None) -> str:
    told: dict[str, Any] = {name: msgspec.to_builtins(run) for name, run in predictions.items()}
    if chosen is not None:
        told = {"best": asdict(chosen), "tried": told}
    return json.dumps(told, indent=2)
