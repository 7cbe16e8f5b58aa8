"""The same machines used in other ways: other splits between the roles, other modes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from umbra.deploy.simulator.prediction import Prediction
from umbra.deploy.simulator.scenario import Scenario
from umbra.deploy.simulator.simulation import Simulation
from umbra.proto.errors import UsageError

SPLITS = 15  # that are tried at most

# What each mode sets, but for the split between the roles.
MODES: dict[str, Mapping[str, Mapping[str, Any]]] = {
    "synchronous, all take turns": {"buffer": {"run_ahead": 0}},
    "synchronous, fixed split": {"buffer": {"run_ahead": 0}},
    "one step off": {"buffer": {"run_ahead": 1, "max_staleness": 1, "stale_policy": "wait"}},
    "asynchronous, no partials": {"generator": {"kv_policy": "drain"}},
    "asynchronous": {},
}
COLOCATED = "synchronous, all take turns"


def simulate(scenario: Scenario) -> Prediction:
    """What comes of it.

    Raises:
        DeadlineError: the trainer would have given up, because no batch came.
    """
    with _only_errors():
        return Simulation(scenario).run()


@contextmanager
def _only_errors() -> Iterator[None]:
    """The broker and the hub would tell of every simulated death."""
    log = logging.getLogger("umbra")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def splits(scenario: Scenario) -> list[int]:
    """GPUs for the trainer that are worth a try: whole nodes if there are enough of them.

    Raises:
        UsageError: there is nothing to divide.
    """
    cluster = scenario.tables.cluster
    free = cluster.gpus - cluster.scorer_gpus
    unit = cluster.gpus_per_node if free >= 4 * cluster.gpus_per_node else 1
    most = (free - cluster.generator_gpus) // unit
    if most < 1 or scenario.config.buffer.run_ahead == 0:
        raise UsageError(
            "--sweep divides the GPUs between training and generation, which needs "
            f"buffer.run_ahead >= 1 and more GPUs than cluster.gpus = {cluster.gpus}"
            if most < 1
            else "--sweep looks for the best split of an asynchronous run: set buffer.run_ahead"
        )
    count = min(SPLITS, most)
    return sorted({unit * max(1, round(most * n / count)) for n in range(1, count + 1)})


def sweep(scenario: Scenario) -> Iterator[tuple[int, Prediction]]:
    """What comes of `splits`, by GPUs of the trainer, one after another."""
    for gpus in splits(scenario):
        yield gpus, simulate(scenario.changed(cluster={"trainer_gpus": gpus}))


def modes(scenario: Scenario) -> Iterator[tuple[str, Prediction]]:
    """What comes of `MODES`; `scenario` is the asynchronous one, and its split is kept.

    Raises:
        UsageError: it is not asynchronous.
    """
    if scenario.config.buffer.run_ahead == 0 or scenario.colocated:
        raise UsageError(
            "--compare sets other modes beside an asynchronous run: set buffer.run_ahead >= 1 and "
            "cluster.trainer_gpus >= 1"
        )
    for name, changes in MODES.items():
        cluster = {"trainer_gpus": 0} if name == COLOCATED else {}
        yield name, simulate(scenario.changed(**changes, cluster=cluster))
