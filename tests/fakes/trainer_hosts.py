"""A trainer on several hosts: this process is host 0, the others are mount namespaces.

Each has a /dev/shm of its own, in which a part hub runs (`umbra weight-hub --owner`), and where we
write as its ranks would. They may have networks of their own as well (`programs.network.Host`).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from fakes.commands import SEARCH
from fakes.hub_bench import WAIT_S, Bench
from fakes.keys import of
from fakes.slowness import until
from programs.network import Host

from umbra.proto.net.keys import OPEN
from umbra.proto.records import Manifest
from umbra.services.weights.arena import PAGE_BYTES
from umbra.services.weights.manifest import build_manifest, checksum, owned_buckets

HOLD = "mount -t tmpfs tmpfs /dev/shm; echo up; exec cat"


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
    if shutil.which("nsenter") is None:
        pytest.skip("nsenter is not installed", allow_module_level=True)
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    done = subprocess.run(probe, capture_output=True, check=False)
    if done.returncode:
        why = f"a second /dev/shm needs root: {done.stderr.decode().strip()}"
        pytest.skip(why, allow_module_level=True)


class TrainerHost:
    """One of the other trainer hosts; without a `machine` only its /dev/shm is its own."""

    def __init__(self, owner: int, upstream: str, log: Path, machine: Host | None = None) -> None:
        self.owner = owner
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []
        if machine is None:
            hold = ["unshare", "--mount", "sh", "-ec", HOLD]
            holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._processes.append(holder)
            assert holder.stdout is not None
            holder.stdout.readline()
            pid, address = holder.pid, "127.0.0.1"
            inside = ["nsenter", f"--target={pid}", "--mount", "--"]
        else:
            pid, address, inside = machine.pid, machine.address, machine.enter
        self.root = f"/proc/{pid}/root"  # its files as we see them
        self._part = [
            *inside, sys.executable, "-m", "umbra", "weight-hub", "--upstream", upstream,
            "--set", f"weight_hub.listen=tcp://{address}:*", "--owner", str(owner),
            "--set", 'weight_hub.delta="always"',
        ]  # fmt: skip

    def start_part(self, *options: str) -> None:
        """Start its part hub; does not wait until it is there."""
        environ = {**os.environ, "PYTHONPATH": SEARCH}
        with self._log.open("ab") as log:
            part = subprocess.Popen([*self._part, *options], env=environ, stdout=log, stderr=log)
        self._processes.append(part)

    def signal_part(self, number: signal.Signals) -> None:
        """Send its part hub a signal; after SIGKILL it is gone."""
        self._processes[-1].send_signal(number)
        if number == signal.SIGKILL:
            self._processes[-1].wait(WAIT_S)

    def memory(self) -> int:
        """Count the bytes that its arenas take."""
        files = Path(self.root, "dev/shm").glob("umbra-*")
        return sum(file.stat().st_blocks * 512 for file in files)

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.communicate()


class Trainer:
    """Rank 0 with its hub, and the other hosts; versions differ a little from one another."""

    def __init__(
        self,
        bench: Bench,
        folder: Path,
        hosts: int,
        *,
        keys: Path | None = None,
        machines: Mapping[int, Host] | None = None,
    ) -> None:
        self.manifest = layout(hosts)
        self.bench = bench
        self.path = ""  # of the arena
        self.versions: dict[int, bytes] = {}
        self._random = random.Random(0)
        self._now = bytearray(self._random.randbytes(self.manifest.total_bytes))
        self.options = {"plane": "auto", "delta": "always"}
        bench.start(**self.options)
        at = machines or {}
        self.hosts = [
            TrainerHost(owner, bench.endpoint, folder / f"host-{owner}.log", at.get(owner))
            for owner in range(1, hosts)
        ]
        open_binds = ["--set", "security.insecure=true"] if machines else []
        for host in self.hosts:
            bench.closers.append(host.close)
            host.start_part(*(["--keys", str(keys)] if keys else open_binds))
        channel = bench.channel("trainer", of(keys, "trainer") if keys else OPEN)
        self.publisher = bench.publisher(self.manifest, channel=channel)

    def write(self, version: int, *, fresh: bool = False) -> list[int]:
        """Write `version` on all hosts, `fresh` with other bytes everywhere; its checksums."""
        if fresh:
            self._now[:] = self._random.randbytes(len(self._now))
        for _ in range(20):
            place = self._random.randrange(len(self._now))
            self._now[place] ^= 1
        self.versions[version] = bytes(self._now)
        data = memoryview(self.versions[version])
        self.publisher.slot(version, WAIT_S)
        self.path, slot = self.publisher.place
        begin = slot * -(-len(data) // PAGE_BYTES) * PAGE_BYTES
        sums = [0] * len(self.manifest.buckets)
        for owner, own in owned_buckets(self.manifest).items():
            root = self.hosts[owner - 1].root if owner else ""
            with open(f"{root}{self.path}", "r+b", buffering=0) as file:
                for bucket in own:
                    start, end = self.manifest.buckets[bucket]
                    sums[bucket] = checksum(data[start:end])
                    os.pwrite(file.fileno(), data[start:end], begin + start)
        return sums

    def publish(self, version: int) -> None:
        self.publisher.publish(version, 0.0, self.write(version))

    def until_held_back(self) -> str:
        """Wait until the hub has noticed that a part is missing; why pushes wait."""
        return until(lambda: self.bench.hub.protocol.held_back, "the hub misses nobody")
