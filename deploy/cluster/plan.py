"""What runs where: a cluster and a run in, processes on nodes out. Nothing is read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import msgspec

from umbra.deploy.cluster.cluster_file import ClusterFile, ClusterSpec, Node, Task
from umbra.deploy.cluster.placement import TaskGroup, place_groups
from umbra.proto.errors import UsageError
from umbra.services.runtime.config import RunConfig

STAGES: tuple[Task, ...] = ("ref_logp", "logp", "reward")


@dataclass(frozen=True, slots=True)
class Process:
    """One process: what it does, on which node, and with which of its GPUs."""

    name: str
    task: Task
    node: Node
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run on a cluster. `groups` is empty on a cluster that has no GPUs."""

    run_id: str
    config: RunConfig
    cluster: ClusterSpec
    nodes: tuple[Node, ...]
    groups: tuple[TaskGroup, ...]
    processes: tuple[Process, ...]

    def on(self, node: Node) -> list[Process]:
        """The processes of `node`, in the order in which they start."""
        return [process for process in self.processes if process.node == node]

    def the(self, task: Task) -> Process:
        """The only process that does `task`."""
        (found,) = (process for process in self.processes if process.task == task)
        return found

    def idle(self, node: Node) -> list[int]:
        """GPUs of `node` that nothing uses."""
        used = {gpu for process in self.on(node) for gpu in process.gpus}
        return [gpu for gpu in range(node.gpus) if gpu not in used]

    def shares_gpus(self) -> bool:
        """Whether a GPU has several processes."""
        used = [
            (process.node.name, gpu)
            for process in self.processes
            if process.task not in ("weight_hub", "relay")
            for gpu in process.gpus
        ]
        return len(used) != len(set(used))

    def readdressed(self, address: Callable[[Node], str]) -> Plan:
        """The plan with another address of each node, for launchers that give them."""

        def moved(node: Node) -> Node:
            return msgspec.structs.replace(node, address=address(node))

        processes = tuple(replace(p, node=moved(p.node)) for p in self.processes)
        return replace(self, nodes=tuple(map(moved, self.nodes)), processes=processes)

    @property
    def on_gpus(self) -> bool:
        """Whether the run uses GPUs at all."""
        return any(node.gpus for node in self.nodes)


def make_plan(file: ClusterFile, config: RunConfig, run_id: str) -> Plan:
    """Place the processes of the run on the nodes.

    Args:
        config: of the run, with absolute paths.
        run_id: names the folder of the run's results.

    Raises:
        UsageError: it cannot be done; the sentence has the numbers.
    """
    if not config.model.path:
        raise UsageError("model.path is empty: name the model's directory in the run file")
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
    groups = place_groups(file, config)
    nodes = tuple(file.nodes)
    broker = next((node for node in nodes if node.name == file.cluster.broker), nodes[0])
    (training,) = (group for group in groups if "train" in group.tasks)
    home = training.nodes[0]
    processes = [
        Process("buffer", "buffer", broker),
        Process("weight-hub", "weight_hub", home, _first_gpu(file, config, home)),
        *_relays(file, config, groups, home),
        Process("trainer", "train", home, _trainer_gpus(config, training)),
        *_generators(config, groups),
        *_scorers(config, groups, broker),
    ]
    return Plan(run_id, config, file.cluster, nodes, tuple(groups), tuple(processes))


def _first_gpu(file: ClusterFile, config: RunConfig, node: Node) -> tuple[int, ...]:
    """The GPU that hub and relays send from, where plane `nccl` may be chosen for them."""
    chosen = {"nccl": True, "auto": file.cluster.network == "host" and len(file.nodes) > 1}
    hub = config.weight_hub
    return (hub.device,) if chosen.get(hub.plane, False) and node.gpus else ()


def _relays(
    file: ClusterFile, config: RunConfig, groups: list[TaskGroup], home: Node
) -> Iterator[Process]:
    """One on every node but the hub's that has receivers of new weights."""
    receiving = {
        node.name
        for group in groups
        if "generate" in group.tasks or "logp" in group.tasks
        for node in group.nodes
    }
    for node in file.nodes:
        if node != home and node.name in receiving:
            yield Process(f"relay-{node.name}", "relay", node, _first_gpu(file, config, node))


def _trainer_gpus(config: RunConfig, group: TaskGroup) -> tuple[int, ...]:
    """The GPUs of the trainer's ranks: all of its group's, or as many as trainer.ranks says."""
    gpus = group.gpus[0]
    ranks = config.trainer.ranks
    if not gpus or ranks == 1:
        return gpus
    if ranks > len(gpus):
        raise UsageError(
            f"trainer.ranks = {ranks}, but {group.describe()} has {len(gpus)} GPUs "
            f"({group.arithmetic}): raise its ratio, or lower trainer.ranks"
        )
    return gpus[:ranks]


def _generators(config: RunConfig, groups: list[TaskGroup]) -> Iterator[Process]:
    """As many as the GPUs of each node allow, or generator.count in all without GPUs."""
    (group,) = (group for group in groups if "generate" in group.tasks)
    if not group.has_gpus:
        yield from _dealt(group, "generate", "generator", config.generator.count)
        return
    size = config.generator.replicas * config.generator.tensor_parallel
    most = max(map(len, group.gpus))
    if most < size:
        raise UsageError(
            f"a generator needs {size} GPUs (generator.replicas x tensor_parallel), but "
            f"{group.describe()} has at most {most} on one node ({group.arithmetic}): raise its "
            "ratio, or lower them"
        )
    for node, gpus in zip(group.nodes, group.gpus, strict=True):
        for index in range(len(gpus) // size):
            own = gpus[index * size : (index + 1) * size]
            yield Process(f"generator-{node.name}-{index}", "generate", node, own)


def _scorers(config: RunConfig, groups: list[TaskGroup], broker: Node) -> Iterator[Process]:
    """One per GPU for models; rewards need none and run beside the buffer, unless a group says."""
    for stage in STAGES:
        name = stage.replace("_", "-")
        group = next((group for group in groups if stage in group.tasks), None)
        if stage not in config.buffer.stages:
            continue
        if stage == "reward" and group is None:
            for index in range(config.scorer.reward):
                yield Process(f"{name}-{broker.name}-{index}", stage, broker)
            continue
        assert group is not None  # place_groups has checked it
        if stage == "reward" or not group.has_gpus:
            yield from _dealt(group, stage, name, getattr(config.scorer, stage))
            continue
        for node, gpus in zip(group.nodes, group.gpus, strict=True):
            for index, gpu in enumerate(gpus):
                yield Process(f"{name}-{node.name}-{index}", stage, node, (gpu,))


def _dealt(group: TaskGroup, task: Task, name: str, count: int) -> Iterator[Process]:
    """`count` processes without GPUs, dealt in turn to the group's nodes, one each at least."""
    nodes = group.nodes
    for index in range(max(count, len(nodes))):
        node = nodes[index % len(nodes)]
        yield Process(f"{name}-{node.name}-{index // len(nodes)}", task, node)
