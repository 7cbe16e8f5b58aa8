"""A trainer on several hosts: this process is host 0, the others are mount namespaces.

Each has a /dev/shm of its own, in which a part hub runs (`umbra weight-hub --owner`) and a program
that writes what the ranks there would. They may have networks of their own as well (`Place`).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
from fakes.hub_bench import PROGRAMS, WAIT_S, Bench
from fakes.keys import of
from fakes.slowness import until

from umbra.proto.net.keys import OPEN
from umbra.proto.records import Manifest
from umbra.services.weights.manifest import build_manifest, checksum, owned_buckets

HOLD = "mount -t tmpfs tmpfs /dev/shm; echo up; exec cat"
ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def layout(hosts: int) -> Manifest:
    """A layout whose larger tensors are cut by rows over `hosts`."""
    tensors = [("embed", "BF16", [1200, 64]), ("layer", "F32", [240, 100]), ("norm", "F16", [64])]
    owners = {
        name: [(shape[0] * (host + 1) // hosts, host) for host in range(hosts)]
        for name, _, shape in tensors[:2]
    }
    return build_manifest(tensors, 32768, owners)


def skip_without_namespaces() -> None:
    """Skip the tests of a module where this user cannot have a second /dev/shm."""
    missing = [name for name in ("unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed", allow_module_level=True)
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    done = subprocess.run(probe, capture_output=True, check=False)
    if done.returncode:
        why = f"a second /dev/shm needs root: {done.stderr.decode().strip()}"
        pytest.skip(why, allow_module_level=True)


@dataclass(frozen=True)
class Place:
    """A host with a network of its own: how to start something in it, and its address."""

    enter: list[str]
    address: str


class TrainerHost:
    """One of the other trainer hosts; without a `place` only its /dev/shm is its own."""

    def __init__(
        self, owner: int, hub: str, manifest: Path, folder: Path, place: Place | None = None
    ) -> None:
        self.owner = owner
        self.memory = 0  # bytes that its arena takes
        self._hub = hub
        self._manifest = manifest
        self._log = folder / f"host-{owner}.log"
        self._holder: subprocess.Popen[bytes] | None = None
        if place is None:
            pipe = subprocess.PIPE
            hold = ["unshare", "--mount", "sh", "-ec", HOLD]
            self._holder = subprocess.Popen(hold, stdin=pipe, stdout=pipe)
            assert _line(self._holder.stdout) == b"up"
            place = Place(["nsenter", f"--target={self._holder.pid}", "--mount", "--"], "127.0.0.1")
        self._inside = place.enter
        self._listen = f"tcp://{place.address}:*"
        self._part: subprocess.Popen[bytes] | None = None
        self._writer: subprocess.Popen[bytes] | None = None

    def start_part(self, *options: str) -> None:
        """Start its part hub; does not wait until it is there."""
        umbra = [sys.executable, "-m", "umbra", "weight-hub", "--upstream", self._hub]
        own = ["--set", f"weight_hub.listen={self._listen}", "--owner", str(self.owner), *options]
        with self._log.open("ab") as log:
            self._part = subprocess.Popen(
                [*self._inside, *umbra, *own, "--set", 'weight_hub.delta="always"'],
                env=ENVIRON, stdout=log, stderr=log,
            )  # fmt: skip

    def signal_part(self, number: signal.Signals) -> None:
        """Send its part hub a signal; after SIGKILL it is gone."""
        assert self._part is not None
        self._part.send_signal(number)
        if number == signal.SIGKILL:
            self._part.wait(WAIT_S)

    def sh(self, command: str) -> str:
        argv = [*self._inside, "sh", "-ec", command]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    def write(self, place: tuple[str, int], file: Path) -> dict[int, int]:
        """Write its share of the version in `file`; the checksums of its buckets."""
        if self._writer is None:
            program = [sys.executable, str(PROGRAMS / "trainer_host.py"), str(self._manifest)]
            self._writer = subprocess.Popen(
                [*self._inside, *program, str(self.owner)],
                env=ENVIRON, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert _line(self._writer.stdout) == b"up"
        path, slot = place
        assert self._writer.stdin is not None
        order = {"path": path, "slot": slot, "file": str(file)}
        self._writer.stdin.write(json.dumps(order).encode() + b"\n")
        self._writer.stdin.flush()
        answer = json.loads(_line(self._writer.stdout))
        self.memory = answer["memory"]
        return {int(bucket): value for bucket, value in answer["sums"].items()}

    def close(self) -> None:
        for process in (self._part, self._writer, self._holder):
            if process is None:
                continue
            process.kill()
            process.wait(WAIT_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


class Trainer:
    """Rank 0 with its hub, and the other hosts; versions differ a little from one another."""

    def __init__(
        self,
        bench: Bench,
        folder: Path,
        hosts: int,
        *,
        keys: Path | None = None,
        places: Mapping[int, Place] | None = None,
        **options: Any,
    ) -> None:
        self.manifest = layout(hosts)
        self.bench = bench
        self.versions: dict[int, bytes] = {}
        self._random = random.Random(0)
        self._now = bytearray(self._random.randbytes(self.manifest.total_bytes))
        self._folder = folder
        file = folder / "manifest.json"
        file.write_bytes(msgspec.json.encode(self.manifest))
        self.options = {"plane": "auto", "delta": "always", **options}
        bench.start(**self.options)
        at = places or {}
        self.hosts = [
            TrainerHost(owner, bench.endpoint, file, folder, at.get(owner))
            for owner in range(1, hosts)
        ]
        open_binds = ["--set", "security.insecure=true"]
        given = ["--keys", str(keys)] if keys else open_binds if places else []
        for host in self.hosts:
            bench.closers.append(host.close)
            host.start_part(*given)
        security = of(keys, "trainer") if keys else OPEN
        channel = bench.channel("trainer", security)
        self.publisher = bench.publisher(self.manifest, channel=channel)

    @property
    def arena_path(self) -> Path:
        """Where the memory of rank 0's versions is mapped."""
        assert self.publisher._arena is not None
        return self.publisher._arena.path

    def write(self, version: int, *, fresh: bool = False) -> list[int]:
        """Write `version` on all hosts, `fresh` with other bytes everywhere; its checksums."""
        if fresh:
            self._now[:] = self._random.randbytes(len(self._now))
        for _ in range(20):
            place = self._random.randrange(len(self._now))
            self._now[place] ^= 1
        data = self.versions[version] = bytes(self._now)
        slot = self.publisher.slot(version, WAIT_S)
        file = self._folder / f"version-{version}"
        file.write_bytes(data)
        sums: dict[int, int] = {}
        for bucket in owned_buckets(self.manifest)[0]:
            start, end = self.manifest.buckets[bucket]
            slot[start:end] = data[start:end]
            sums[bucket] = checksum(slot[start:end])
        for host in self.hosts:
            sums |= host.write(self.publisher.place, file)
        return [sums[bucket] for bucket in range(len(self.manifest.buckets))]

    def publish(self, version: int) -> None:
        self.publisher.publish(version, 0.0, self.write(version))

    def until_held_back(self) -> str:
        """Wait until the hub has noticed that a part is missing; why pushes wait."""
        return until(lambda: self.bench.hub.protocol.held_back, "the hub misses nobody")


def _line(stream: IO[bytes] | None) -> bytes:
    assert stream is not None
    return stream.readline().strip()
