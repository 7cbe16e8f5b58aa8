"""Pushes with Umbra: a hub, receivers and relays as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_keys import security_of
from weight_links import Links
from weight_model import Model

from umbra.services.runtime.net.io_thread import IoThread
from umbra.services.runtime.weights.publisher import Publisher

SCRIPT = Path(__file__).with_name("weight_push.py")
DEADLINE_S = 600.0
WARM_UPS = 2  # versions before those that count, of every method
BUCKET_BYTES = 4 << 20


@dataclass(frozen=True)
class Pushed:
    """One push: seconds, and bytes on the wire to the first receiver.

    Its floors were measured beside it: a cast of the same tensors for the snapshot, a copy for the
    commit.
    """

    push_s: float
    snapshot_s: float
    commit_s: float
    wire_bytes: int
    nbytes: int
    changed: float
    cast_floor_s: float
    copy_floor_s: float
    hub_cpu_s: float = 0.0
    receiver_cpu_s: float = 0.0  # of the first one


class Role:
    """A process of the benchmark; lines of JSON come out of it. It ends when its stdin does."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def hear(self) -> dict[str, Any]:
        """Its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)

    def tell(self, text: str) -> None:
        """A line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{text}\n")
        self._process.stdin.flush()

    @property
    def cpu_s(self) -> float:
        """Its CPU time so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def role(*arguments: object, prefix: Sequence[str] = ()) -> Role:
    """Start a role of `weight_push.py`."""
    return Role([*prefix, sys.executable, str(SCRIPT), *map(str, arguments)])


def push_umbra(
    model: Model,
    plane: str,
    delta: str,
    lr: float,
    count: int,
    passes: int,
    *,
    links: Links | None = None,
    relays: bool = False,
) -> list[Pushed]:
    """Push `passes` versions, after those that warm up, to `count` receivers."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        metrics = folder / "metrics.jsonl"
        listen = f"tcp://{links.address(0)}:*" if links else "tcp://127.0.0.1:*"
        prefix = links.enter(0) if links else ()
        hub = stack.enter_context(
            closing(role("hub", plane, delta, listen, metrics, prefix=prefix))
        )
        endpoint = hub.hear()["endpoint"]
        link = IoThread("trainer", uuid.uuid4().hex, security=security_of("trainer"))
        stack.callback(link.close)
        manifest = model.manifest(BUCKET_BYTES)
        publisher = Publisher(link.channel(endpoint, "weight hub", server="weight_hub"), manifest)
        stack.callback(publisher.close)
        publisher.register(DEADLINE_S)
        receivers: list[Role] = []
        for index in range(count):
            prefix = links.enter(index + 1) if links else ()
            source, way = endpoint, plane
            if relays:
                assert links is not None
                listen = f"tcp://{links.address(index + 1)}:*"
                command = ["relay", f"relay-{index}", endpoint, listen]
                relay = stack.enter_context(closing(role(*command, prefix=prefix)))
                source, way = relay.hear()["endpoint"], "shm"
            command = ["receiver", f"gen-{index}", source, way, model.size]
            receivers.append(stack.enter_context(closing(role(*command, prefix=prefix))))
            receivers[-1].hear()
        versions = range(passes + WARM_UPS)
        runs = [_push(model, publisher, hub, receivers, version, lr) for version in versions]
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        sent = {r["version"]: r["wire_bytes"] for r in rows if r["receiver"].endswith("-0")}
        return [
            replace(run, wire_bytes=sent[version])
            for version, run in enumerate(runs)
            if version >= WARM_UPS
        ]


def _push(
    model: Model, publisher: Publisher, hub: Role, receivers: list[Role], version: int, lr: float
) -> Pushed:
    """One push, all but its bytes on the wire."""
    changed = model.learn(lr) if version else 0.0
    hub_s, receiver_s = hub.cpu_s, receivers[0].cpu_s
    began = time.monotonic()
    slot = publisher.slot(version, DEADLINE_S)
    model.write(publisher.manifest, slot, publisher.wrote)
    publisher.publish_soon(version, time.monotonic() - began)
    snapshot_s = time.monotonic() - began
    heard = [receiver.hear() for receiver in receivers]
    assert all(line["version"] == version and line["whole"] for line in heard), heard
    push_s = max(line["done_at"] for line in heard) - began
    return Pushed(
        push_s=push_s,
        snapshot_s=snapshot_s,
        commit_s=max(line["commit_s"] for line in heard),
        wire_bytes=0,
        nbytes=model.nbytes,
        changed=changed,
        cast_floor_s=model.cast_seconds(),
        copy_floor_s=model.copy_seconds(),
        hub_cpu_s=hub.cpu_s - hub_s,
        receiver_cpu_s=receivers[0].cpu_s - receiver_s,
    )
