"""Pushes with Umbra: a hub, receivers and relays as processes of their own."""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from bench_keys import security_of
from weight_links import Links
from weight_model import Model
from weight_processes import Role

from umbra.proto.deadline import Deadline
from umbra.proto.net.io_thread import IoThread
from umbra.services.weights.publisher import Publisher

DEADLINE_S = 600.0
WARM_UPS = 2  # versions before those that count, of every method
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class Pushed:
    """One push: seconds, and bytes on the wire to the first receiver.

    Its floors were measured beside it: a cast of the same tensors for the snapshot; for the commit
    a copy, and the receivers' own loads from memory, all at once (None for others' methods).
    """

    push_s: float
    snapshot_s: float
    commit_s: float
    wire_bytes: int
    nbytes: int
    changed: float
    cast_floor_s: float
    copy_floor_s: float
    load_floor_s: float | None = None
    hub_cpu_s: float = 0.0
    receiver_cpu_s: float = 0.0  # of the first one


@dataclass(frozen=True)
class Relays:
    """Relays between the hub and the receivers, one on each node but the hub's.

    Attributes:
        above: by relay whom it asks: another one's number, or -1 for the hub, which makes a chain
            of those that ask it.
        engines: receivers of each.
    """

    above: tuple[int, ...]
    engines: int = 1


def chain(count: int, engines: int = 1) -> Relays:
    """`count` relays that all ask the hub."""
    return Relays((-1,) * count, engines)


def push_umbra(
    model: Model,
    plane: str,
    delta: str,
    lr: float | None,
    count: int,
    passes: int,
    *,
    links: Links | None = None,
    relays: Relays | None = None,
) -> list[Pushed]:
    """Push `passes` versions, after those that warm up, to `count` receivers.

    Between versions the model learns with the rate `lr`; without one each bucket changes a little.
    With `relays`, which need `links`, `count` is the number of all their engines.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        metrics = folder / "metrics.jsonl"

        def on_node(node: int, *arguments: object) -> Role:
            namespace = links.namespace(node) if links else ""
            return stack.enter_context(closing(Role(*arguments, namespace=namespace)))

        def listen(node: int) -> str:
            return f"tcp://{links.address(node) if links else '127.0.0.1'}:*"

        hub = on_node(0, "hub", plane, delta, listen(0), metrics)
        endpoint = hub.hear()["endpoint"]
        link = IoThread("trainer", uuid.uuid4().hex, security=security_of("trainer"))
        stack.callback(link.close)
        manifest = model.manifest(BUCKET_BYTES)
        publisher = Publisher(link.channel(endpoint, "weight hub", server="weight_hub"), manifest)
        stack.callback(publisher.close)
        publisher.register(DEADLINE_S)
        served: list[str] = []  # whom each relay's engines ask
        for index, above in enumerate(relays.above if relays else ()):
            asked = endpoint if above < 0 else served[above]
            made = on_node(index + 1, "relay", f"relay-{index}", asked, listen(index + 1))
            served.append(made.hear()["endpoint"])
        receivers: list[Role] = []
        for index in range(count):
            node, asked, way = index + 1 if links else 0, endpoint, plane
            if relays:
                node = 1 + index // relays.engines
                asked, way = served[node - 1], "shm"
            name = f"gen-{index}"
            receivers.append(on_node(node, "receiver", name, asked, way, model.size, model.share))
        for receiver in receivers:
            receiver.hear()
        versions = range(passes + WARM_UPS)
        runs = [_push(model, publisher, hub, receivers, version, lr) for version in versions]
        sent = _sent(metrics, len(runs))
        return [
            replace(run, wire_bytes=sent[version])
            for version, run in enumerate(runs)
            if version >= WARM_UPS
        ]


def _sent(metrics: Path, count: int) -> dict[int, int]:
    """Bytes on the wire to the first receiver by version, when the hub has rows of so many.

    A receiver tells us that it serves a version as soon as it tells the hub.
    """
    deadline = Deadline(DEADLINE_S, "no rows of all versions from the hub")
    while True:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        sent = {r["version"]: r["wire_bytes"] for r in rows if r["receiver"].endswith("-0")}
        if len(sent) == count:
            return sent
        deadline.check()
        time.sleep(0.01)


def step(model: Model, lr: float | None) -> float:
    """What changes the model between two versions; the share of values that changed."""
    if lr is not None:
        return model.learn(lr)
    model.touch()
    return 0.0


def _push(
    model: Model,
    publisher: Publisher,
    hub: Role,
    receivers: list[Role],
    version: int,
    lr: float | None,
) -> Pushed:
    """One push, all but its bytes on the wire."""
    changed = step(model, lr) if version else 0.0
    hub_s, receiver_s = hub.cpu_s, receivers[0].cpu_s
    began = time.monotonic()
    slot = publisher.slot(version, DEADLINE_S)
    model.write(publisher.manifest, slot, publisher.wrote)
    publisher.publish_soon(version, time.monotonic() - began)
    snapshot_s = time.monotonic() - began
    heard = [receiver.hear() for receiver in receivers]
    assert all(line["version"] == version and line["whole"] for line in heard), heard
    push_s = max(line["done_at"] for line in heard) - began
    for receiver in receivers:
        receiver.tell("load")
    loads = [receiver.hear()["load_s"] for receiver in receivers]
    return Pushed(
        push_s=push_s,
        snapshot_s=snapshot_s,
        commit_s=max(line["commit_s"] for line in heard),
        wire_bytes=0,
        nbytes=model.nbytes,
        changed=changed,
        cast_floor_s=model.cast_seconds(),
        copy_floor_s=model.copy_seconds(),
        load_floor_s=max(loads),
        hub_cpu_s=hub.cpu_s - hub_s,
        receiver_cpu_s=receivers[0].cpu_s - receiver_s,
    )
