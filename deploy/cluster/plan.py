"""Placement: a cluster and a run in, processes on nodes out. Nothing is read or written.

Each group of tasks gets `ratio x units`, which has to be a whole number: of nodes if it is one for
all groups, else of GPUs. Nodes and GPUs are given out in the order of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice

import msgspec

from umbra.deploy.cluster.cluster_file import ClusterFile, ClusterSpec, Node, Port, Task
from umbra.proto.errors import UsageError
from umbra.services.config import RunConfig
from umbra.services.config.rules import check_feasible

# Ratios are written with a few digits: 0.333, whose sum may be off, and whose shares of units.
RATIO_OFF, SHARE_OFF = Fraction(1, 1000), Fraction(1, 20)
STAGES: tuple[Task, ...] = ("ref_logp", "logp", "reward")
TASKS = ("train", "generate", *STAGES)
# async-rl's names.
FOREIGN_TASKS = {"actor-train": "train", "actor_train": "train", "rollout": "generate"}


Place = tuple[Node, tuple[int, ...]]  # a node, and GPUs on it: none on a cluster without any


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """Tasks that share places: each task may use all GPUs of the group."""

    tasks: tuple[str, ...]
    places: tuple[Place, ...]
    arithmetic: str  # how many nodes or GPUs the group got, and why

    def describe(self) -> str:
        return f"group [{', '.join(self.tasks)}]"


def place_groups(file: ClusterFile, config: RunConfig) -> list[TaskGroup]:
    """Return the groups with their shares of the nodes that do not join later, in file order.

    Where GPUs are divided the group that trains comes first and gets its GPUs on the first node
    that has as many, else on the fewest nodes. UsageError says, with the numbers, where tasks and
    ratios do not fit the run or the nodes.
    """
    tasks = [(group,) if isinstance(group, str) else tuple(group) for group in file.cluster.groups]
    _check_tasks(tasks, config.buffer.stages)
    ratios = check_ratios(file.cluster.ratios, len(tasks))
    nodes = [node for node in file.nodes if not node.joins]
    with_gpus = [node for node in nodes if node.gpus]
    homes, gpus = with_gpus or nodes, sum(node.gpus for node in nodes)
    needed = config.trainer.nodes
    if not gpus and len(nodes) < len(tasks):  # dealt in turn
        homes = [nodes[index % len(nodes)] for index in range(len(tasks))]
        groups = [
            TaskGroup(names, ((node, ()),), f"node {node.name}, as there are no GPUs to divide")
            for names, node in zip(tasks, homes, strict=True)
        ]
    elif counts := whole_shares(ratios, len(homes)):
        groups = _divide_nodes(tasks, ratios, homes, counts)
    elif counts := whole_shares(ratios, gpus):
        groups = _divide_gpus(tasks, ratios, with_gpus, counts, needed)
    else:
        units, unit = (gpus, "GPUs") if gpus else (len(nodes), "nodes")
        shares = ", ".join(f"{float(ratio * units):.3g}" for ratio in ratios)
        raise UsageError(
            f"cluster.ratios: the groups would get {shares} of {units} {unit}: set ratios that "
            f"give each a whole number, at least 1 (a ratio is that number / {units}), or join "
            "groups in one list, so that they share"
        )
    training = _group_of("train", groups)
    if needed > 1 and len(training.places) != needed:
        raise UsageError(
            f"trainer.nodes = {needed}, but {training.describe()} gets {len(training.places)} "
            f"({training.arithmetic}): change its ratio, or leave trainer.nodes out"
        )
    return groups


def _group_of(task: str, groups: Sequence[TaskGroup]) -> TaskGroup:
    return next(group for group in groups if task in group.tasks)


def _check_tasks(groups: Sequence[tuple[str, ...]], stages: Sequence[str]) -> None:
    tasks = [task for group in groups for task in group]
    for task in tasks:
        if task in FOREIGN_TASKS:
            raise UsageError(f"cluster.groups: {task} is called {FOREIGN_TASKS[task]} here")
        if task not in TASKS:
            raise UsageError(f"cluster.groups: unknown task {task!r}; known: {', '.join(TASKS)}")
        if tasks.count(task) > 1:
            raise UsageError(f"cluster.groups names {task} twice")
        if task not in ("train", "generate", *stages):
            raise UsageError(
                f"cluster.groups names {task}, but buffer.stages = {stages}: remove "
                "it, or add the stage to the run file"
            )
    for task in ("train", "generate", *stages):
        if task not in tasks and task != "reward":
            raise UsageError(f"cluster.groups lacks {task}: add it as a group, or to one")
    if not all(groups):
        raise UsageError("cluster.groups has an empty group")
    if ("reward",) in groups:
        raise UsageError(
            "cluster.groups gives nodes to reward alone, which needs no GPU: leave it out, and its "
            "scorers run on the buffer's node"
        )


def whole_shares(ratios: Sequence[Fraction], units: int) -> list[int]:
    """Return each group's number of `units`; an empty list if one is not whole, or 0."""
    counts = [round(ratio * units) for ratio in ratios]
    off = max(abs(ratio * units - count) for ratio, count in zip(ratios, counts, strict=True))
    return counts if off <= SHARE_OFF and min(counts) and sum(counts) == units else []


def _divide_nodes(
    groups: Sequence[tuple[str, ...]],
    ratios: Sequence[Fraction],
    nodes: list[Node],
    counts: Sequence[int],
) -> list[TaskGroup]:
    free, task_groups = iter(nodes), list[TaskGroup]()
    for tasks, ratio, count in zip(groups, ratios, counts, strict=True):
        own = tuple((node, tuple(range(node.gpus))) for node in islice(free, count))
        task_groups.append(TaskGroup(tasks, own, _arithmetic(ratio, len(nodes), "nodes", count)))
    return task_groups


def _divide_gpus(
    groups: Sequence[tuple[str, ...]],
    ratios: Sequence[Fraction],
    nodes: list[Node],
    counts: Sequence[int],
    spread: int,
) -> list[TaskGroup]:
    """Divide GPUs; the trainer's are on as few nodes as possible (or `spread`), equally many each.

    The group that trains gets its GPUs before the others.
    """
    total = sum(node.gpus for node in nodes)
    free = {node.name: list(range(node.gpus)) for node in nodes}
    task_groups: dict[int, TaskGroup] = {}
    for index in sorted(range(len(groups)), key=lambda i: "train" not in groups[i]):
        tasks, count = groups[index], counts[index]
        arithmetic = _arithmetic(ratios[index], total, "GPUs", count)
        homes, each = nodes, count
        if "train" in tasks:
            homes = _fewest_nodes(count, nodes, spread)
            if not homes:
                over = f"over {spread} nodes (trainer.nodes) " if spread > 1 else ""
                raise UsageError(
                    f"group [{', '.join(tasks)}] gets {count} GPUs ({arithmetic}), which cannot be "
                    f"divided {over}in equal parts, as a trainer's must be; the nodes have "
                    f"{', '.join(str(node.gpus) for node in nodes)}: change its ratio"
                )
            each = count // len(homes)
        places: list[Place] = []
        for node in homes:
            own = free[node.name][: min(each, count)]
            del free[node.name][: len(own)]
            count -= len(own)
            places += [(node, tuple(own))] if own else []
        task_groups[index] = TaskGroup(tasks, tuple(places), arithmetic)
    return [task_groups[index] for index in range(len(groups))]


def _fewest_nodes(count: int, nodes: list[Node], spread: int) -> list[Node]:
    """Return the fewest nodes (or `spread`) that have `count` GPUs in equal parts."""
    for number in [spread] if spread > 1 else range(1, len(nodes) + 1):
        candidates = [node for node in nodes if node.gpus * number >= count]
        if count % number == 0 and len(candidates) >= number:
            return candidates[:number]
    return []


def _arithmetic(ratio: Fraction, units: int, unit: str, count: int) -> str:
    return f"ratio {float(ratio):.3g} x {units} {unit} = {count}"


def check_ratios(ratios: Sequence[float], groups: int) -> list[Fraction]:
    """Return exact ratios, equal ones if there are none; UsageError unless they add up to 1."""
    if not ratios:
        return [Fraction(1, groups)] * groups
    if len(ratios) != groups:
        raise UsageError(
            f"cluster.ratios has {len(ratios)} numbers for {groups} groups: give one to each"
        )
    exact = [Fraction(str(ratio)) for ratio in ratios]
    total = sum(exact, Fraction(0))
    if abs(total - 1) > RATIO_OFF * groups:
        terms = " + ".join(f"{ratio:g}" for ratio in ratios)
        raise UsageError(f"cluster.ratios: {terms} = {float(total):g}, and not 1")
    return [ratio / total for ratio in exact]


@dataclass(frozen=True, slots=True)
class Process:
    """One process: what it does, on which node, and with which of its GPUs.

    `node_rank` counts the nodes of a trainer that has several, for the processes on each.
    """

    name: str
    task: Task
    node: Node
    gpus: tuple[int, ...] = ()
    node_rank: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run on a cluster; its `config` says how the trainer is spread, as the plan has it."""

    run_id: str
    config: RunConfig
    cluster: ClusterSpec
    nodes: tuple[Node, ...]
    groups: tuple[TaskGroup, ...]
    processes: tuple[Process, ...]

    def on(self, node: Node) -> list[Process]:
        """Return the processes of `node` in the order in which they start."""
        return [process for process in self.processes if process.node == node]

    def the(self, task: Task) -> Process:
        """Return the only process that does `task`; of a trainer's the one with rank 0."""
        (process,) = (p for p in self.processes if p.task == task and not p.node_rank)
        return process

    def trainers(self) -> list[Process]:
        """Return the trainer's process on each of its nodes, by node rank."""
        return [process for process in self.processes if process.task == "train"]

    def idle(self, node: Node) -> list[int]:
        busy = {gpu for process in self.on(node) for gpu in process.gpus}
        return [gpu for gpu in range(node.gpus) if gpu not in busy]

    def shares_gpus(self) -> bool:
        computing = [p for p in self.processes if p.task not in ("weight_hub", "relay", "part")]
        assigned = [(process.node.name, gpu) for process in computing for gpu in process.gpus]
        return len(assigned) != len(set(assigned))

    def readdressed(self, address: Callable[[Node], str]) -> Plan:
        """Return the plan with other addresses of nodes, for launchers that give them."""

        def relocate(node: Node) -> Node:
            return msgspec.structs.replace(node, address=address(node))

        processes = tuple(replace(p, node=relocate(p.node)) for p in self.processes)
        return replace(self, nodes=tuple(map(relocate, self.nodes)), processes=processes)


def make_plan(file: ClusterFile, config: RunConfig, run_id: str) -> Plan:
    """Place the processes of the run on the nodes; UsageError has the numbers if that fails.

    `config` has absolute paths; it is checked once the plan has said how many ranks and nodes the
    trainer has. `run_id` names the folder of the run's results.
    """
    if not config.model.path:
        raise UsageError("model.path is empty: name the model's directory in the run file")
    if config.generator.urls:
        raise UsageError(
            "generator.urls: a plan starts engines of its own; with servers that others start, run "
            "`umbra up` with generator.count = 0, and `umbra generator` beside the servers"
        )
    plane = config.weight_hub.plane
    if plane == "cuda_ipc":
        raise UsageError(
            "weight_hub.plane = cuda_ipc joins processes of one container or host: leave it on auto"
        )
    if plane == "nccl" and file.cluster.network != "host":
        raise UsageError(
            "weight_hub.plane = nccl opens ports of its own: set cluster.network to host, or leave "
            "the plane on auto"
        )
    groups, staying = place_groups(file, config), [node for node in file.nodes if not node.joins]
    broker = next((node for node in staying if node.name == file.cluster.broker), staying[0])
    training = _group_of("train", groups)
    home, *others = [node for node, _ in training.places]
    config = _spread_trainer(config, training, file.cluster)
    check_feasible(config)
    ranks = config.trainer.ranks // len(training.places)  # on each node
    # Hub and relays send from a GPU where plane `nccl` may be chosen for them. It never is where no
    # host has all of a version: with several trainer nodes.
    several = len(file.nodes) > 1 and not others
    on_gpu = plane == "nccl" or (plane == "auto" and file.cluster.network == "host" and several)
    receiving = [n for g in groups if {"generate", "logp"} & {*g.tasks} for n, _ in g.places]
    processes = [
        Process("buffer", "buffer", broker),
        Process("weight-hub", "weight_hub", home, (0,) if on_gpu and home.gpus else ()),
        *(
            Process(f"relay-{node.name}", "relay", node, (0,) if on_gpu and node.gpus else ())
            for node in file.nodes
            if node != home and (node.joins or node in receiving)
        ),
        *(Process(f"part-{n.name}", "part", n, node_rank=k) for k, n in enumerate(others, 1)),
        *(
            Process(
                f"trainer-{node.name}" if rank else "trainer", "train", node, gpus[:ranks], rank
            )
            for rank, (node, gpus) in enumerate(training.places)
        ),
        *_generators(config, [node for node in file.nodes if node.joins], groups),
        *_scorers(config, groups, broker),
    ]
    return Plan(run_id, config, file.cluster, tuple(file.nodes), tuple(groups), tuple(processes))


def _spread_trainer(config: RunConfig, group: TaskGroup, cluster: ClusterSpec) -> RunConfig:
    """Return `config` with the trainer's nodes, all its ranks, and its rendezvous.

    There is a rank for each GPU, or there are as many as trainer.ranks says.
    """
    trainer, plane, nodes = config.trainer, config.weight_hub.plane, len(group.places)
    counts = [len(gpus) for _, gpus in group.places]
    smallest, largest, ranks = min(counts), max(counts), trainer.ranks
    if largest and ranks == 1:
        ranks = smallest * nodes
        if smallest != largest:
            has = ", ".join(f"{node.name} {len(gpus)}" for node, gpus in group.places)
            raise UsageError(
                f"a trainer has as many ranks on each of its nodes, but the nodes of "
                f"{group.describe()} have different numbers of GPUs ({has}): set trainer.ranks to "
                f"{ranks}, or list nodes of one kind first"
            )
    if ranks % nodes:
        raise UsageError(
            f"trainer.ranks = {ranks} cannot be divided equally over the {nodes} nodes of "
            f"{group.describe()} ({group.arithmetic}): set it to a multiple of {nodes}, or change "
            "its ratio"
        )
    if largest and ranks > smallest * nodes:
        raise UsageError(
            f"trainer.ranks = {ranks}, but {group.describe()} has {smallest * nodes} GPUs "
            f"({group.arithmetic}): raise its ratio, or lower trainer.ranks"
        )
    rendezvous = trainer.rendezvous
    if nodes > 1:
        if rendezvous:
            raise UsageError(
                f"trainer.rendezvous = {rendezvous}, but the plan chooses where a "
                "trainer's ranks meet: leave it out"
            )
        if plane in ("shm", "nccl"):
            raise UsageError(
                f"weight_hub.plane = {plane} sends from one host, and the "
                f"trainer's weights are on {nodes}: leave it on auto"
            )
        rendezvous = f"{group.places[0][0].address}:{cluster.port(Port.RENDEZVOUS)}"
    change = msgspec.structs.replace
    resolved = change(trainer, nodes=nodes, ranks=ranks, rendezvous=rendezvous)
    return change(config, trainer=resolved)


def _generators(
    config: RunConfig, joining: list[Node], groups: list[TaskGroup]
) -> Iterator[Process]:
    """Yield as many as the GPUs of each node allow, joining ones included.

    Without GPUs there are generator.count, and one on each node that joins.
    """
    group, size = _group_of("generate", groups), config.generator.tensor_parallel
    largest = max(len(gpus) for _, gpus in group.places)
    if 0 < largest < size:
        raise UsageError(
            f"a generator needs {size} GPUs (generator.tensor_parallel), but "
            f"{group.describe()} has at most {largest} on one node ({group.arithmetic}): raise its "
            "ratio, or lower it"
        )
    yield from _spread("generate", "generator", group.places, config.generator.count, size)
    for node in joining:
        if largest and node.gpus < size:
            raise UsageError(
                f"node {node.name} joins to generate, and a generator needs {size} GPUs "
                f"(generator.tensor_parallel): it has {node.gpus}"
            )
        gpus = tuple(range(node.gpus)) if largest else ()
        yield from _spread("generate", "generator", [(node, gpus)], 1, size)


def _scorers(config: RunConfig, groups: list[TaskGroup], broker: Node) -> Iterator[Process]:
    """Yield one per GPU for models; rewards run beside the buffer unless a group says."""
    for stage in STAGES:
        if stage not in config.buffer.stages:
            continue
        name, count = stage.replace("_", "-"), config.scorer.processes(stage)
        group = next((group for group in groups if stage in group.tasks), None)
        places = group.places if group else ((broker, ()),) * (count > 0)
        if stage == "reward":
            places = [(node, ()) for node, _ in places]
        yield from _spread(stage, name, places, count)


def _spread(
    task: Task, name: str, places: Sequence[Place], count: int, size: int = 1
) -> Iterator[Process]:
    """Yield a process for every `size` GPUs; without any `count`, at least one on each node."""
    if not any(gpus for _, gpus in places):
        for index in range(max(count, len(places))):
            turn, place = divmod(index, len(places))
            node, _ = places[place]
            yield Process(f"{name}-{node.name}-{turn}", task, node)
        return
    for node, gpus in places:
        for index in range(len(gpus) // size):
            share = gpus[index * size : (index + 1) * size]
            yield Process(f"{name}-{node.name}-{index}", task, node, share)
