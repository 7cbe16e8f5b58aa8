"""`umbra simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import click
import msgspec

from umbra.deploy.simulator.compare import COLOCATED, modes, simulate, sweep
from umbra.deploy.simulator.prediction import Prediction
from umbra.deploy.simulator.scenario import load_scenario
from umbra.deploy.simulator.table import compared, report
from umbra.proto.errors import EXIT_DONE, UsageError


@click.command()
@click.argument("cluster_file", type=click.Path(path_type=Path))
@click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key."
)
@click.option("--seed", type=int, help="Of lengths and failures (run.seed).")
@click.option("--sweep", "sweeps", is_flag=True, help="Find the best split between the roles.")
@click.option("--compare", "compares", is_flag=True, help="Set synchronous modes beside this run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    cluster_file: Path,
    overrides: tuple[str, ...],
    seed: int | None,
    sweeps: bool,
    compares: bool,
    as_json: bool,
) -> int:
    """Predict a run on the machines of CLUSTER_FILE, without them.

    The production broker and push protocol are driven by simulated processes in simulated time. The
    file says how long things take: docs/scale.md has all keys, and what was predicted with it.
    """
    if sweeps and compares:
        raise UsageError("--sweep and --compare are two tables: ask for one")
    if seed is not None:
        overrides = (*overrides, f"run.seed={seed}")
    scenario = load_scenario(cluster_file, overrides)
    if sweeps:
        predictions = {f"{gpus} GPUs train": run for gpus, run in sweep(scenario)}
        best = max(predictions, key=lambda name: predictions[name].samples_per_s)
        text = compared(predictions, best, "split") + f"\nbest: {best}\n"
    elif compares:
        predictions = dict(modes(scenario))
        text = compared(predictions, COLOCATED, "mode")
    else:
        predictions = {"run": simulate(scenario)}
        if scenario.tables.failures:
            predictions["without failures"] = simulate(scenario.without_failures())
        text = report(predictions["run"], predictions.get("without failures"))
    click.echo(_json(predictions) if as_json else text, nl=as_json)
    return EXIT_DONE


def _json(predictions: dict[str, Prediction]) -> str:
    return json.dumps(
        {name: msgspec.to_builtins(run) for name, run in predictions.items()}, indent=2
    )
