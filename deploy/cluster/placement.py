"""Which nodes, and which of their GPUs, each group of tasks gets.

Divides nodes or GPUs among groups of tasks by their ratios. The rule, in order:

1. A group is due `ratio * units`.
2. It gets the whole part of that, but one unit at least.
3. The rest goes, unit by unit, to the group that is furthest below its due; if too much was
   given (because of the least of one), units come back from the group furthest above its due that
   has more than one. Of equals, the one named first gets, and the one named last gives. A group
   that has all that it can use gets no more; what nobody can use stays idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from umbra.deploy.cluster.cluster_file import FOREIGN_TASKS, ClusterFile, Node
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig

TOLERANCE = Fraction(1, 1000)  # ratios are written with a few digits: 0.333
TASKS = ("train", "generate", "ref_logp", "logp", "reward")


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """Tasks that share nodes: each task may use all GPUs of the group.

    `gpus[i]` are those on `nodes[i]`, none on a cluster without any. `arithmetic` says how many
    units the group got, and why.
    """

    tasks: tuple[str, ...]
    nodes: tuple[Node, ...]
    gpus: tuple[tuple[int, ...], ...]
    arithmetic: str

    @property
    def has_gpus(self) -> bool:
        return any(self.gpus)

    def describe(self) -> str:
        return f"group [{', '.join(self.tasks)}]"


def place_groups(file: ClusterFile, config: RunConfig) -> list[TaskGroup]:
    """Return the groups with their shares of the nodes that do not join later, in file order.

    Nodes are given out in the order of the file. Where GPUs are divided the group that trains comes
    first and gets its GPUs on the first node that has as many, else on the fewest nodes.

    Raises:
        UsageError: tasks and ratios do not fit the run or the nodes; the sentence has the numbers.
    """
    tasks = [(group,) if isinstance(group, str) else tuple(group) for group in file.cluster.groups]
    _check_tasks(tasks, config)
    ratios = check_ratios(file.cluster.ratios, len(tasks))
    nodes = [node for node in file.nodes if not node.joins]
    with_gpus = [node for node in nodes if node.gpus]
    unit, wanted = file.cluster.unit, config.trainer.nodes
    if not with_gpus and unit == "gpu":
        raise UsageError("cluster.unit = gpu, but no node has GPUs: write gpus = N in [[nodes]]")
    if not with_gpus and len(nodes) < len(tasks):
        placed = _in_turn(tasks, nodes)
    elif not with_gpus or unit == "node" or (unit == "auto" and len(with_gpus) >= len(tasks)):
        placed = _by_node(tasks, ratios, with_gpus or nodes, wanted)
    else:
        placed = _by_gpu(tasks, ratios, with_gpus, wanted)
    (training,) = (group for group in placed if "train" in group.tasks)
    if wanted > 1 and len(training.nodes) != wanted:
        raise UsageError(
            f"trainer.nodes = {wanted}, but {training.describe()} gets {len(training.nodes)} "
            f"({training.arithmetic}): change its ratio, or leave trainer.nodes out"
        )
    return placed


def _check_tasks(groups: Sequence[tuple[str, ...]], config: RunConfig) -> None:
    named = [task for group in groups for task in group]
    for task in named:
        if task in FOREIGN_TASKS:
            raise UsageError(f"cluster.groups: {task} is called {FOREIGN_TASKS[task]} here")
        if task not in TASKS:
            raise UsageError(f"cluster.groups: unknown task {task!r}; known: {', '.join(TASKS)}")
        if named.count(task) > 1:
            raise UsageError(f"cluster.groups names {task} twice")
        if task not in ("train", "generate", *config.buffer.stages):
            raise UsageError(
                f"cluster.groups names {task}, but buffer.stages = {config.buffer.stages}: remove "
                "it, or add the stage to the run file"
            )
    needed = ["train", "generate", *(s for s in config.buffer.stages if s != "reward")]
    for task in needed:
        if task not in named:
            raise UsageError(f"cluster.groups lacks {task}: add it as a group, or to one")
    if not all(groups):
        raise UsageError("cluster.groups has an empty group")
    if ("reward",) in groups:
        raise UsageError(
            "cluster.groups gives nodes to reward alone, which needs no GPU: leave it out, and its "
            "scorers run on the buffer's node"
        )


def _by_node(
    groups: Sequence[tuple[str, ...]],
    ratios: Sequence[Fraction],
    nodes: Sequence[Node],
    trainer_nodes: int,
) -> list[TaskGroup]:
    """Divide whole nodes; the trainer's share is rounded up only to `trainer_nodes`."""
    if len(nodes) < len(groups):
        raise UsageError(
            f"{len(groups)} groups need {len(groups)} nodes with GPUs, and there are {len(nodes)}: "
            "set cluster.unit to gpu, or join groups"
        )
    limits = [
        max(trainer_nodes, int((ratio + TOLERANCE) * len(nodes))) if "train" in tasks else None
        for tasks, ratio in zip(groups, ratios, strict=True)
    ]
    counts = divide(ratios, len(nodes), limits)
    placed: list[TaskGroup] = []
    start = 0
    for tasks, ratio, count in zip(groups, ratios, counts, strict=True):
        own = tuple(nodes[start : start + count])
        start += count
        arithmetic = _arithmetic(ratio, len(nodes), count, "nodes")
        gpus = tuple(tuple(range(node.gpus)) for node in own)
        placed.append(TaskGroup(tasks, own, gpus, arithmetic))
    return placed


def _by_gpu(
    groups: Sequence[tuple[str, ...]],
    ratios: Sequence[Fraction],
    nodes: Sequence[Node],
    trainer_nodes: int,
) -> list[TaskGroup]:
    """Divide GPUs; the trainer's are on as few nodes as possible, equally many on each."""
    total = sum(node.gpus for node in nodes)
    if total < len(groups):
        raise UsageError(
            f"{len(groups)} groups need {len(groups)} GPUs at least, and the nodes have {total}: "
            "join groups in one list, so that they share"
        )
    counts = divide(ratios, total, [None] * len(groups))
    free = {node.name: list(range(node.gpus)) for node in nodes}
    order = sorted(range(len(groups)), key=lambda i: "train" not in groups[i])
    placed: dict[int, TaskGroup] = {}
    for index in order:
        tasks, count = groups[index], counts[index]
        arithmetic = _arithmetic(ratios[index], total, count, "GPUs")
        if "train" in tasks:
            homes = _spread(count, nodes, trainer_nodes)
            if not homes:
                over = f"over {trainer_nodes} nodes (trainer.nodes) " if trainer_nodes > 1 else ""
                raise UsageError(
                    f"group [{', '.join(tasks)}] gets {count} GPUs ({arithmetic}), which cannot be "
                    f"divided {over}in equal parts, as a trainer's must be; the nodes have "
                    f"{', '.join(str(node.gpus) for node in nodes)}: change its ratio"
                )
            taken = {node.name: _take(free[node.name], count // len(homes)) for node in homes}
        else:
            taken = {}
            for node in nodes:
                taken[node.name] = _take(free[node.name], count - sum(map(len, taken.values())))
        own = tuple(node for node in nodes if taken.get(node.name))
        gpus = tuple(tuple(taken[node.name]) for node in own)
        placed[index] = TaskGroup(tasks, own, gpus, arithmetic)
    return [placed[index] for index in range(len(groups))]


def _spread(count: int, nodes: Sequence[Node], wanted: int) -> list[Node]:
    """Return the fewest nodes (or `wanted`) that have `count` GPUs in equal parts."""
    for number in [wanted] if wanted > 1 else range(1, len(nodes) + 1):
        able = [node for node in nodes if node.gpus * number >= count]
        if count % number == 0 and len(able) >= number:
            return able[:number]
    return []


def _in_turn(groups: Sequence[tuple[str, ...]], nodes: Sequence[Node]) -> list[TaskGroup]:
    """Deal nodes in turn, where there are fewer nodes than groups and no GPUs."""
    return [
        TaskGroup(tasks, (node,), ((),), f"node {node.name}, as there are no GPUs to divide")
        for index, tasks in enumerate(groups)
        for node in [nodes[index % len(nodes)]]
    ]


def _take(free: list[int], count: int) -> list[int]:
    taken = free[:count]
    del free[:count]
    return taken


def _arithmetic(ratio: Fraction, units: int, count: int, what: str) -> str:
    due = ratio * units
    rounded = "" if due == count else f", rounded to {count}"
    return f"ratio {float(ratio):.3g} x {units} {what} = {float(due):.3g}{rounded}"


def check_ratios(ratios: Sequence[float], groups: int) -> list[Fraction]:
    """Return the ratios as exact numbers that add up to 1; equal ones if there are none.

    Raises:
        UsageError: another number of ratios than groups, or a sum that is not 1.
    """
    if not ratios:
        return [Fraction(1, groups)] * groups
    if len(ratios) != groups:
        raise UsageError(
            f"cluster.ratios has {len(ratios)} numbers for {groups} groups: give one to each"
        )
    exact = [Fraction(str(ratio)) for ratio in ratios]
    total = sum(exact, Fraction(0))
    if abs(total - 1) > TOLERANCE * groups:
        terms = " + ".join(f"{ratio:g}" for ratio in ratios)
        raise UsageError(f"cluster.ratios: {terms} = {float(total):g}, and not 1")
    return [ratio / total for ratio in exact]


def divide(ratios: Sequence[Fraction], units: int, limits: Sequence[int | None]) -> list[int]:
    """Units of each group; see the rule above.

    Args:
        ratios: add up to 1.
        units: at least as many as groups.
        limits: the most that a group can use; None is any number.

    Raises:
        ValueError: fewer units than groups.
    """
    if units < len(ratios):
        raise ValueError(f"{units} units for {len(ratios)} groups")
    due = [ratio * units for ratio in ratios]
    given = [max(1, int(share)) for share in due]
    indices = range(len(due))
    while sum(given) > units:
        able = [i for i in indices if given[i] > 1]
        given[max(able, key=lambda i: (given[i] - due[i], i))] -= 1
    while sum(given) < units:
        able = [i for i in indices if (limit := limits[i]) is None or given[i] < limit]
        if not able:
            break
        given[max(able, key=lambda i: (due[i] - given[i], -i))] += 1
    return given
