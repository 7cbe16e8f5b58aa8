"""Small clusters to simulate, whose figures can be worked out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from umbra.deploy.simulator.scenario import Scenario, scenario_of

INSTANT = {"message_s": 0.0, "trajectory_s": 0.0, "bytes_per_s": 1e18, "commit_s": 0.0}
BASE: dict[str, dict[str, Any]] = {
    "cluster": {"gpus": 2, "trainer_gpus": 1},
    "run": {"steps": 8},
    "buffer": {"group_size": 2, "batch_groups": 2, "run_ahead": 0},
    "generator": {"slots": 4, "prefetch": 0},
    "speed": {
        "decode": {"step_s": 0.01, "token_s": 0.001},
        "training": {"step_s": 1.4},
        "network": {"latency_s": 0.0},
        "broker": INSTANT,
    },
    "samples": {"prompt_tokens": 0, "lengths": {"kind": "uniform", "least": 100, "most": 100}},
}


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`tree` with `changes` at any depth; what has a kind is replaced as a whole."""
    result = dict(tree)
    for key, value in changes.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict) and "kind" not in value
        result[key] = merged(result[key], value) if both else value
    return result


def scenario(**changes: Any) -> Scenario:
    """One generator of four slots and a trainer, who need 1.4 s for a batch each; or `changes`."""
    return scenario_of(merged(BASE, changes), "test.toml", Path())
