"""A plan for people, and for programs."""

from __future__ import annotations

from typing import Any

from umbra.deploy.cluster import invocation
from umbra.deploy.cluster.plan import Plan, Process
from umbra.services.reporting.tables import aligned

HEADINGS = ("node", "address", "GPUs", "process", "task", "ports")


def table(plan: Plan) -> str:
    """Return the plan as columns, and below it what each group got and what is idle."""
    rows: list[tuple[str, ...]] = [HEADINGS]
    for node in plan.nodes:
        node_cells = [node.name, node.address]
        for process in plan.on(node):
            rows.append((*node_cells, *_cells(plan, process)))
            node_cells = ["", ""]
        if idle := plan.idle(node):
            rows.append((*node_cells, _span(tuple(idle)), "-", "idle", ""))
        elif not plan.on(node):
            rows.append((*node_cells, "", "-", "idle", ""))
    groups = [f"{group.describe()}: {group.arithmetic}" for group in plan.groups]
    return "\n".join([*aligned(rows), "", *groups, *_spread(plan)]) + "\n"


def as_json(plan: Plan) -> dict[str, Any]:
    return {
        "run": plan.run_id,
        "trainer": {
            "nodes": [process.node.name for process in plan.trainers()],
            "ranks": plan.config.trainer.ranks,
            "rendezvous": plan.config.trainer.rendezvous,
        },
        "groups": [
            {
                "tasks": list(group.tasks),
                "nodes": [node.name for node in group.nodes],
                "arithmetic": group.arithmetic,
            }
            for group in plan.groups
        ],
        "nodes": [
            {
                "name": node.name,
                "address": node.address,
                "gpus": node.gpus,
                "idle_gpus": plan.idle(node),
                "processes": [
                    {
                        "name": process.name,
                        "task": process.task,
                        "node_rank": process.node_rank,
                        "gpus": list(process.gpus),
                        "ports": invocation.ports(plan, process),
                    }
                    for process in plan.on(node)
                ],
            }
            for node in plan.nodes
        ],
    }


def _spread(plan: Plan) -> list[str]:
    """Return how a trainer over several nodes connects, for firewalls."""
    trainers, trainer = plan.trainers(), plan.config.trainer
    if len(trainers) == 1:
        return []
    names = ", ".join(process.node.name for process in trainers)
    return [
        f"trainer: {trainer.ranks} ranks on {names}, which meet at {trainer.rendezvous}; they "
        "connect with each other at any port"
    ]


def _cells(plan: Plan, process: Process) -> tuple[str, ...]:
    ports = invocation.ports(plan, process)
    return (
        _span(process.gpus),
        process.name,
        process.task.replace("_", "-"),
        "-".join(map(str, sorted({ports[0], ports[-1]}))) if ports else "",
    )


def _span(gpus: tuple[int, ...]) -> str:
    if len(gpus) > 2 and gpus[-1] - gpus[0] == len(gpus) - 1:
        return f"{gpus[0]}-{gpus[-1]}"
    return ",".join(map(str, gpus)) or "-"
