"""Clusters and runs to plan with, and what every rendered file is tried with."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import click
import pytest

from umbra import cli
from umbra.deploy.cluster.cluster_file import ClusterFile, ClusterSpec, Node
from umbra.deploy.cluster.command import render as render_plan
from umbra.deploy.cluster.launch import Launch, container_paths, modules_of
from umbra.deploy.cluster.plan import Plan, Process, make_plan
from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config

SCHEMAS = Path(__file__).parents[1] / "schemas"
RUN_FILE = Path("/home/me/project/run.toml")
KEYS = Path("/home/me/keys")


def run_config(*overrides: str, stages: tuple[str, ...] = ()) -> RunConfig:
    """A run with `stages`, on files that need not be there."""
    listed = ", ".join(f'"{stage}"' for stage in stages)
    files = ["model.path=/models/m", "data.prompts=/data/prompts.jsonl"]
    return load_config(overrides=[*files, f"buffer.stages=[{listed}]", *overrides], environ={})


def plan_on(
    nodes: list[Node],
    *,
    stages: tuple[str, ...] = (),
    overrides: tuple[str, ...] = (),
    run_id: str = "demo-20261121-120000-abcd",
    **settings: object,
) -> Plan:
    """A plan on `nodes` with `settings` of [cluster]."""
    spec: Any = ClusterSpec(**settings)  # pyright: ignore[reportArgumentType]
    file = ClusterFile(cluster=spec, nodes=nodes)
    return make_plan(file, run_config(*overrides, stages=stages), run_id)


def plan_of(*gpus: int, **given: Any) -> Plan:
    """A plan on nodes a, b, c ... with `gpus` each."""
    nodes = [
        Node(name="abcdefghi"[index], address=f"10.0.0.{index + 1}", gpus=count)
        for index, count in enumerate(gpus)
    ]
    return plan_on(nodes, **given)


SEPARATE = {"groups": ["logp", "ref_logp", "train", "generate"], "ratios": [0.25] * 4}
HYBRID = {"groups": [["logp", "train"], "ref_logp", "generate"], "ratios": [0.25, 0.25, 0.5]}
BOTH, THREE = ("ref_logp", "logp"), ["train", "ref_logp", "generate"]

# Plans of every mode, by name.
PLANS: dict[str, Plan] = {
    "separate": plan_of(8, 8, 8, 8, stages=BOTH, **SEPARATE),
    "hybrid": plan_of(4, 4, 4, 4, stages=BOTH, **HYBRID),
    "two nodes, GPUs divided": plan_of(
        8, 8, stages=("ref_logp",), groups=THREE, ratios=[0.5, 0.1875, 0.3125]
    ),
    "one node": plan_of(8, stages=BOTH, **SEPARATE),
    "one GPU": plan_of(1, groups=[["train", "generate"]]),
    "host network": plan_of(2, 2, network="host", overrides=("weight_hub.plane=nccl",)),
    "head without GPUs": plan_of(0, 8, 8, stages=("reward",), overrides=("scorer.count.reward=3",)),
    "no GPUs": plan_of(0, 0, 0, stages=("reward", "ref_logp"), groups=THREE),
    "trainer on two nodes": plan_of(8, 8, 8, 8),
    "trainer and logp on two nodes": plan_of(
        4, 4, 4, 4, stages=BOTH, **{**HYBRID, "ratios": [0.5, 0.25, 0.25]}
    ),
    "own modules": plan_of(
        0, 0, overrides=("environment.kind=reward", "environment.reward=reward:score")
    ),
}

plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def render(plan: Plan, *formats: str, out: Path = Path("/out")) -> dict[str, str]:
    return render_plan(plan, formats, modules_of(plan.config, RUN_FILE), out, KEYS)


def launched(plan: Plan, process: Process) -> Launch:
    return Launch(plan, process, container_paths(plan, "", keys=True))


def parse_planned(arguments: list[str]) -> None:
    """Parse `arguments` by the real commands, without running them; fails on what they refuse."""
    command: click.Command = cli.cli
    context = click.Context(command)
    name, rest = "umbra", arguments
    while True:
        context = command.make_context(name, rest, parent=context, resilient_parsing=False)
        if not isinstance(command, click.Group):
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # click 9 will have them all in args
            left = [*context.protected_args, *context.args]
        if not left:
            return
        name, found, rest = command.resolve_command(context, left)
        assert found is not None
        command = found
