"""How long a push of a model takes at sizes that were not measured, from what was measured small.

The path is the code's: every rank casts its share into the arena of its host; the first relay
fetches all buckets from the hub and the part hubs, every other relay from the one before it, and
hands each on as it comes; engines copy a version from their node's relay when it is whole, verify
it, and load it at a token boundary. With V bytes, H trainer hosts of R ranks, engines of T GPUs,
E engines on each of N nodes, a link of L bytes/s, and c, the bytes/s that a host's memory copies:

    snapshot = V / H / min(R snapshot, c)                          training waits
    wire     = V / w + (N - 1) (bucket / w + latency)              nobody waits
               w = min(L, connections tcp), or min(L / share, delta) where deltas travel
    copy     = V / min(shm, c / E)                                 nobody waits
    load     = V / T / min(load, c / (E T))                        generation waits

`snapshot`, `tcp`, `delta`, `shm` and `load` are bytes of weights per second of one process, as
benchmarks/weight_push.py measures them. GPUs, NCCL and congestion are not in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from umbra.deploy.cluster.cluster_file import read_tree
from umbra.deploy.simulator.scenario import assign
from umbra.deploy.simulator.tables import Table
from umbra.proto.errors import UsageError
from umbra.services.reporting.numbers import number

_Rate = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1)]
GBIT = 1e9 / 8  # bytes


class PushCosts(Table, frozen=True, kw_only=True):
    """Bytes of weights per second of one process."""

    snapshot: _Rate  # a rank casts into the arena
    tcp: _Rate  # a receiver fetches and verifies, over a link that is no limit
    shm: _Rate  # a receiver copies and verifies
    load: _Rate  # an engine loads
    tcp_keys: Annotated[float, Meta(ge=0)] = 0.0  # as tcp, with encryption; 0 = unknown
    delta: Annotated[float, Meta(ge=0)] = 0.0  # as tcp, by deltas; 0 = unknown
    delta_share: Annotated[float, Meta(gt=0, le=1)] = 1.0  # of the bytes that travels by deltas


class PushHosts(Table, frozen=True, kw_only=True):
    """The machines, as they are sold: two sockets, eight GPUs."""

    gpus: _Count = 8  # of a node with engines
    ranks: _Count = 8  # of a trainer's host
    copy: _Rate = 200e9  # bytes/s that the memory of a host copies, all cores together
    links: tuple[_Rate, ...] = (10.0, 100.0, 400.0)  # Gbit/s of a node
    delta_link: _Rate = 1  # Gbit/s, where deltas are looked at
    connections: _Count = 1  # for buckets, between two relays
    bucket_bytes: _Count = 4 << 20
    latency_s: Annotated[float, Meta(ge=0)] = 100e-6


class PushModel(Table, frozen=True, kw_only=True):
    """What is pushed."""

    name: str
    nbytes: _Rate  # as served
    tensor_parallel: _Count  # GPUs of an engine
    trainer_hosts: _Count


class PushTables(Table, frozen=True, kw_only=True):
    """A whole file. Trainers have 16 bytes of GPU memory for each parameter, on GPUs of 80 GB."""

    costs: PushCosts
    hosts: PushHosts = PushHosts()
    engines: tuple[_Count, ...] = (8, 64, 512)
    models: tuple[PushModel, ...] = (
        PushModel(name="8B", nbytes=16e9, tensor_parallel=1, trainer_hosts=1),
        PushModel(name="32B", nbytes=66e9, tensor_parallel=2, trainer_hosts=1),
        PushModel(name="235B", nbytes=470e9, tensor_parallel=8, trainer_hosts=8),
        PushModel(name="1T, fp8", nbytes=1.03e12, tensor_parallel=8, trainer_hosts=32),
        PushModel(name="1T", nbytes=2.06e12, tensor_parallel=8, trainer_hosts=32),
    )


# What others say of themselves: seconds until all engines have the weights.
PUBLISHED: dict[str, str] = {
    "235B": "checkpoint-engine 6.2 (8 H800)",
    "1T, fp8": "checkpoint-engine 16 (256 H20); Perplexity 1.3",
}


class PushTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table; seconds. `wire_s` and `total_s` are by Gbit/s of the link."""

    model: str
    nbytes: float
    trainer_hosts: int
    engines: int
    nodes: int
    snapshot_s: float
    wire_s: dict[str, float]
    keys_s: float | None  # on the wire with encryption, over the fastest link
    delta_s: float | None  # on the wire by deltas, over `delta_link`
    copy_s: float
    load_s: float
    total_s: dict[str, float]
    published: str


def push_times(tables: PushTables, model: PushModel, engines: int) -> PushTimes:
    """The formulas above."""
    costs, hosts = tables.costs, tables.hosts
    nodes = math.ceil(engines * model.tensor_parallel / hosts.gpus)
    beside = math.ceil(engines / nodes)  # engines of a node
    nbytes, tp = model.nbytes, model.tensor_parallel

    def wire(rate: float) -> float:
        hop = min(hosts.bucket_bytes, nbytes) / rate + hosts.latency_s
        return nbytes / rate + (nodes - 1) * hop

    snapshot = nbytes / model.trainer_hosts / min(hosts.ranks * costs.snapshot, hosts.copy)
    most = hosts.connections * costs.tcp
    wires = {f"{link:g}": wire(min(link * GBIT, most)) for link in hosts.links}
    with_keys = min(max(hosts.links) * GBIT, hosts.connections * costs.tcp_keys)
    with_deltas = min(hosts.delta_link * GBIT / costs.delta_share, costs.delta)
    copy = nbytes / min(costs.shm, hosts.copy / beside)
    load = nbytes / tp / min(costs.load, hosts.copy / (beside * tp))
    return PushTimes(
        model=model.name,
        nbytes=nbytes,
        trainer_hosts=model.trainer_hosts,
        engines=engines,
        nodes=nodes,
        snapshot_s=snapshot,
        wire_s=wires,
        keys_s=wire(with_keys) if with_keys else None,
        delta_s=wire(with_deltas) if with_deltas else None,
        copy_s=copy,
        load_s=load,
        total_s={link: snapshot + seconds + copy + load for link, seconds in wires.items()},
        published=PUBLISHED.get(model.name, ""),
    )


def all_times(tables: PushTables) -> list[PushTimes]:
    """Every model on every number of engines."""
    return [push_times(tables, model, n) for model in tables.models for n in tables.engines]


def columns(tables: PushTables) -> list[str]:
    """Headings of `cells`."""
    links = [f"{link:g}" for link in tables.hosts.links]
    return [
        "model", "GB", "trainer hosts", "engines", "nodes", "training waits s",
        *(f"wire s, {link} Gbit/s" for link in links),
        "with keys", f"deltas, {tables.hosts.delta_link:g} Gbit/s",
        "copies s", "generation waits s", f"in all s, {links[-1]} Gbit/s", "published s",
    ]  # fmt: skip


def cells(one: PushTimes) -> list[str]:
    """A row of the table, as text."""
    totals = list(one.total_s.values())
    return [
        one.model, number(one.nbytes / 1e9), str(one.trainer_hosts), str(one.engines),
        str(one.nodes), number(one.snapshot_s), *map(number, one.wire_s.values()),
        number(one.keys_s), number(one.delta_s), number(one.copy_s), number(one.load_s),
        number(totals[-1]), one.published or "-",
    ]  # fmt: skip


def load_push(path: Path, overrides: Sequence[str] = ()) -> PushTables:
    """The tables in the TOML file at `path`, or the costs in results of weight_push.py (JSON).

    Raises:
        UsageError: it cannot be read, a key is unknown or bad, or the results lack a row.
    """
    tree: dict[str, Any]
    tree = {"costs": measured_costs(path)} if path.suffix == ".json" else read_tree(path)
    for override in overrides:
        assign(tree, override)
    try:
        return msgspec.convert(tree, PushTables)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from error


def measured_costs(path: Path) -> dict[str, float]:
    """The unit costs in results of benchmarks/weight_push.py: pushes to one receiver on one host.

    Raises:
        UsageError: it cannot be read, or lacks a row.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        found = {r["method"]: r for r in rows if r["part"] == "one host" and r["receivers"] == 1}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no file of results of benchmarks/weight_push.py") from error
    shm, tcp = _row(found, "`shm`", path), _row(found, "`tcp`, all bytes", path)
    delta = _row(found, "`tcp`, deltas, lr 1e-6", path)
    return {
        "snapshot": shm["nbytes"] / shm["snapshot_s"],
        "tcp": _between(tcp),
        "shm": _between(shm),
        "load": shm["nbytes"] / shm["commit_s"],
        "delta": _between(delta),
        "delta_share": delta["wire_bytes"] / delta["nbytes"],
    }


def _row(found: Mapping[str, Any], method: str, path: Path) -> Mapping[str, Any]:
    if method not in found:
        raise UsageError(f"{path} has no push by {method} to one receiver on the same host")
    return found[method]


def _between(row: Mapping[str, Any]) -> float:
    """Bytes per second of what is neither snapshot nor load: on the way, and verified."""
    return row["nbytes"] / (row["push_s"] - row["snapshot_s"] - row["commit_s"])
