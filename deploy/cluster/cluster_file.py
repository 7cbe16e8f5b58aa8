"""The cluster file: nodes, who shares which part of them, and how containers are made."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from umbra.proto.errors import UsageError

NAME = r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$"  # good in host names, container names and Kubernetes
# What async-rl's settings are called here.
FOREIGN = {
    "sperated_node_tasks": "groups",
    "separated_node_tasks": "groups",
    "sperated_node_ratios": "ratios",
    "separated_node_ratios": "ratios",
}
FOREIGN_TASKS = {"actor-train": "train", "actor_train": "train", "rollout": "generate"}


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine."""

    name: Annotated[str, Meta(description="its host name for SLURM and Kubernetes", pattern=NAME)]
    address: Annotated[
        str, Meta(description="host name or address by which the others reach it", min_length=1)
    ]
    gpus: Annotated[int, Meta(description="GPUs that the run may use: 0 to n - 1", ge=0)] = 0


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the nodes are shared, and what every container has in common."""

    groups: Annotated[
        list[str | list[str]],
        Meta(description="tasks train, generate, ref_logp, logp, reward; those in a list share"),
    ] = msgspec.field(default_factory=lambda: ["train", "generate"])
    ratios: Annotated[
        list[Annotated[float, Meta(gt=0, le=1)]],
        Meta(description="share of the nodes (or GPUs) of each group; empty = equal shares"),
    ] = []
    unit: Annotated[
        Literal["auto", "node", "gpu"],
        Meta(description="what ratios count; auto = nodes, and GPUs if there are fewer nodes"),
    ] = "auto"
    broker: Annotated[str, Meta(description="node of the buffer; empty = the first one")] = ""
    base_port: Annotated[
        int, Meta(description="first of the six ports that the run uses", ge=1024, le=65530)
    ] = 5555
    image: Annotated[
        str, Meta(description="images are called IMAGE-broker:TAG and so on", min_length=1)
    ] = "umbra"
    tag: Annotated[str, Meta(description="tag of the images", min_length=1)] = "latest"
    user: Annotated[str, Meta(description="uid:gid of the processes in containers")] = "10001:10001"
    shm_gib: Annotated[
        int, Meta(description="GiB of shared memory per node, for the weights' versions", ge=1)
    ] = 16
    network: Annotated[
        Literal["bridge", "host"],
        Meta(description="containers publish the run's ports, or use the host's network (NCCL)"),
    ] = "bridge"


class ClusterFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    cluster: ClusterSpec
    nodes: list[Node]


S = TypeVar("S", bound=msgspec.Struct)


def read_tree(path: Path) -> dict[str, Any]:
    """What the cluster file at `path` says, unchecked.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"cluster file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cluster file {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"cluster file {path} is not valid TOML: {error}") from error


def load_cluster(path: Path) -> ClusterFile:
    """Read and check a cluster file.

    Raises:
        UsageError: it cannot be read, or a key is unknown (with the nearest name) or bad.
    """
    tree = read_tree(path)
    for section in tree:
        if section not in ("cluster", "nodes"):
            near = nearest(section, ["cluster", "nodes"])
            raise UsageError(f"{path}: unknown section [{section}]{near}")
    listed = tree.get("nodes", [])
    if not isinstance(listed, list) or not listed:
        raise UsageError(f"{path}: there are no nodes: write a table [[nodes]] for each")
    file = ClusterFile(
        cluster=_read(ClusterSpec, tree.get("cluster", {}), f"{path}: cluster"),
        nodes=[_read(Node, n, f"{path}: nodes[{i}]") for i, n in enumerate(listed)],
    )
    for key in ("name", "address"):
        values = [getattr(node, key) for node in file.nodes]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise UsageError(f"{path}: two nodes have the {key} {twice}")
    names = [node.name for node in file.nodes]
    if file.cluster.broker and file.cluster.broker not in names:
        raise UsageError(
            f"{path}: cluster.broker = {file.cluster.broker} is no node"
            f"{nearest(file.cluster.broker, names)}"
        )
    return file


def _read(kind: type[S], values: Any, where: str) -> S:
    if not isinstance(values, Mapping):
        raise UsageError(f"{where} must be a table")
    known = [field.name for field in msgspec.structs.fields(kind)]
    for key in values:
        if key in FOREIGN:
            raise UsageError(f"{where}.{key} is async-rl's: write {FOREIGN[key]}")
        if key not in known:
            raise UsageError(f"{where}: unknown key {key}{nearest(key, known)}")
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        key = place.rstrip("`")
        raise UsageError(f"{where}{key}: {what[0].lower()}{what[1:]}") from error


def nearest(name: str, known: list[str]) -> str:
    """A hint at what `name`, which is not `known`, was meant to be."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"
