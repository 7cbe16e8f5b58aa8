"""The cluster file: nodes, who shares which part of them, and how containers are made."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from umbra.proto.errors import UsageError
from umbra.services.config.loader import SECTIONS, read_run_file

NAME = r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"  # of hosts; what else needs names makes its own
# What async-rl's settings are called here.
FOREIGN = {
    **dict.fromkeys(("sperated_node_tasks", "separated_node_tasks"), "groups"),
    **dict.fromkeys(("sperated_node_ratios", "separated_node_ratios"), "ratios"),
}


Text = Annotated[str, Meta(min_length=1)]
SbatchOption = Annotated[str, Meta(pattern=r"^--[a-z][a-z-]*(=[^\x00-\x1f]*)?$")]


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table of the cluster file; docs/cluster.md describes the keys."""


class Node(_Table, frozen=True):
    name: Annotated[str, Meta(pattern=NAME)]  # its host name for SLURM and Kubernetes
    address: Text  # by which the others reach it
    gpus: Annotated[int, Meta(ge=0)] = 0  # that the run may use: 0 to n - 1
    joins: bool = False  # has generators alone, which may come and go while the run goes on


Task = Literal[
    "buffer", "weight_hub", "relay", "part", "train", "generate", "ref_logp", "logp", "reward"
]  # fmt: skip


class Port(IntEnum):
    """The run's ports, counted from `base_port`. A hub and a relay are never on one node."""

    CONTROL = 0
    DATA = 1
    EVENTS = 2
    WEIGHTS = 3
    BUCKETS = 4
    PART = 5
    RENDEZVOUS = 6  # where the ranks of a trainer over several nodes meet


def planner() -> str:
    """Return uid:gid of the planning user, to whom the files belong; the images' user for root."""
    return f"{os.geteuid()}:{os.getegid()}" if os.geteuid() else "10001:10001"


class ClusterSpec(_Table, frozen=True):
    """Shares of the nodes, and settings that all containers have in common."""

    # Tasks train, generate, ref_logp, logp, reward; those in a list share nodes.
    groups: list[str | list[str]] = msgspec.field(default_factory=lambda: ["train", "generate"])
    ratios: list[Annotated[float, Meta(gt=0, le=1)]] = []  # of the groups; empty = equal shares
    broker: str = ""  # node of the buffer; empty = the first one
    base_port: Annotated[int, Meta(ge=1024, le=65528)] = 5555  # first of the run's seven ports
    image: Text = "umbra"  # images are called IMAGE-broker:TAG and so on
    tag: Text = "latest"
    user: Annotated[str, Meta(pattern=r"^[0-9]+(:[0-9]+)?$")] = msgspec.field(
        default_factory=planner
    )  # uid:gid of the processes in containers
    shm_gib: Annotated[int, Meta(ge=1)] = 16  # per node, for the weights' versions
    network: Literal["bridge", "host"] = "bridge"  # publish the run's ports, or the host's (NCCL)
    slurm_options: list[SbatchOption] = []  # such as --time=1-12:00:00, besides those for nodes
    inputs_claim: str = ""  # of Kubernetes, with models and prompts; empty = the nodes' own paths

    def port(self, kind: Port) -> int:
        return self.base_port + kind

    @property
    def owner(self) -> tuple[int, int]:
        user, _, group = self.user.partition(":")
        return int(user), int(group or user)


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True):
    cluster: ClusterSpec
    nodes: list[Node]


S = TypeVar("S", bound=msgspec.Struct)


def load_cluster(path: Path) -> ClusterFile:
    """Read and check a cluster file; UsageError names a key that is unknown or bad."""
    tree = read_run_file(path, "cluster file")
    if section := next((name for name in tree if name not in ("cluster", "nodes")), ""):
        hint = nearest(section, ["cluster", "nodes"])
        if section in SECTIONS:
            hint = ", which is of run files: give the cluster file first, then the run file"
        raise UsageError(f"{path}: unknown section [{section}]{hint}")
    listed = tree.get("nodes", [])
    if not isinstance(listed, list) or not listed:
        raise UsageError(f"{path}: there are no nodes: write a table [[nodes]] for each")
    cluster = _convert(ClusterSpec, tree.get("cluster", {}), f"{path}: cluster")
    nodes = [_convert(Node, n, f"{path}: nodes[{i}]") for i, n in enumerate(listed)]
    names = [node.name for node in nodes]
    for sentence, values in (
        ("two nodes have the name {}", names),
        ("two nodes have the address {}", [node.address for node in nodes]),
        (
            "two nodes are {} where no dots are allowed: name them otherwise",
            [name.replace(".", "-") for name in names],
        ),
    ):
        value, count = Counter(values).most_common(1)[0]
        if count > 1:
            raise UsageError(f"{path}: {sentence.format(value)}")
    joining = [node.name for node in nodes if node.joins]
    if len(joining) == len(names):
        raise UsageError(f"{path}: all nodes have joins = true, which only generate: remove one")
    broker = f"{path}: cluster.broker = {cluster.broker}"
    if cluster.broker and cluster.broker not in names:
        raise UsageError(f"{broker} is no node{nearest(cluster.broker, names)}")
    if cluster.broker in joining:
        raise UsageError(
            f"{broker} has joins = true, so it may go while the run goes on: name another node"
        )
    return ClusterFile(cluster=cluster, nodes=nodes)


def _convert(kind: type[S], values: Any, source: str) -> S:
    if not isinstance(values, Mapping):
        raise UsageError(f"{source} must be a table")
    for key in values:
        if key in FOREIGN:
            raise UsageError(f"{source}.{key} is async-rl's: write {FOREIGN[key]}")
        if key not in kind.__struct_fields__:
            known = list(kind.__struct_fields__)
            raise UsageError(f"{source}: unknown key {key}{nearest(key, known)}")
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        fault, _, place = str(error).partition(" - at `$")
        raise UsageError(f"{source}{place.rstrip('`')}: {fault[0].lower()}{fault[1:]}") from error


def nearest(name: str, choices: list[str]) -> str:
    """Return a hint at what the unknown `name` was meant to be."""
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(choices)}"
