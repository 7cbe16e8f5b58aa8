"""Machines made of network namespaces on one bridge, and the services of a run on them."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from umbra.services.process.parent import PARENT_PID_VARIABLE
from umbra.services.process.supervisor import FINAL_CODES

ADDRESSES = {"alpha": "10.78.0.1", "beta": "10.78.0.2", "gamma": "10.78.0.3", "delta": "10.78.0.4"}
BRIDGE = "umbra0"
POLL_S, PAUSE_S, RESTARTS = 0.1, 1.0, 20


def sh(command: str) -> None:
    """Run a shell command; what it says on failure is the error."""
    done = subprocess.run(["sh", "-ec", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")


def make_network(address: str = "") -> None:
    """Make the bridge, on which we have `address`, if any."""
    own = f"ip addr add {address}/24 dev {BRIDGE};" if address else ""
    sh(f"ip link set lo up; ip link add {BRIDGE} type bridge; {own} ip link set {BRIDGE} up")


class Host:
    """A machine with a name and its own /dev/shm, held by a process that sleeps in its namespaces.

    Its end of the link is `eth0`, ours on the bridge is `link`.
    """

    def __init__(self, name: str, address: str = "", link: str = "") -> None:
        self.name, self._link = name, link or f"to-{name}"
        self.address = address or ADDRESSES[name]
        memory = "; ".join(f"mount -t tmpfs tmpfs {folder}" for folder in ("/srv", "/dev/shm"))
        # It ends when we do, because then its input does.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-ec",
             f"hostname {name}; {memory}; echo up; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        self.pid = self._holder.pid
        self.enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--"]
        sh(
            f"ip link add {self._link} type veth peer name eth0 netns {self.pid};"
            f"ip link set {self._link} master {BRIDGE} up"
        )
        up = "ip link set eth0 up; ip link set lo up"
        self.sh(f"ip addr add {self.address}/24 dev eth0; {up}")

    def sh(self, command: str) -> None:
        sh(" ".join([*self.enter, "sh", "-ec", f"'{command}'"]))

    def start(self, script: str, log: Path) -> None:
        """Start a shell script on it that ends with it."""
        with log.open("ab") as out:
            argv = [*self.enter, "sh", "-ec", script]
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def connect(self, *, connected: bool) -> None:
        sh(f"ip link set {self._link} {'up' if connected else 'down'}")


class Service:
    """A process that is started again when it has failed, as by a launcher; it ends with us."""

    def __init__(
        self, name: str, argv: list[str], log: Path, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.name = name
        self.codes: list[int] = []
        self.environ = {**environ, PARENT_PID_VARIABLE: str(os.getpid())}
        self._argv, self._log = argv, log
        self._process: subprocess.Popen[bytes] | None = None
        self._due = math.inf

    def start(self) -> None:
        self._due = math.inf
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, env=self.environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def poll(self) -> bool:
        """Start it again if that is due; whether it runs, or will."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self.codes.append(code)
            self._process = None
            if code not in (0, *FINAL_CODES) and len(self.codes) <= RESTARTS:
                self._due = time.monotonic() + PAUSE_S
        if self._due <= time.monotonic():
            self.start()
        return self._process is not None or self._due < math.inf

    def kill(self) -> None:
        """End it; only `start` starts it again."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process, self._due = None, math.inf


class World:
    """The services of a run, whose `metrics` are files of `folder`, from its start to its end."""

    def __init__(
        self, services: Sequence[Service], folder: Path, metrics: str, limit_s: float
    ) -> None:
        self._services = services
        self._folder, self._metrics = folder, metrics
        self._limit_s, self._begin = limit_s, time.monotonic()

    def __enter__(self) -> World:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
        for service in self._services:
            service.start()
        return self

    def __exit__(self, *_: object) -> None:
        for service in self._services:
            service.kill()

    def step(self) -> int:
        lines = [
            line
            for path in self._folder.glob(self._metrics)
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        ]
        rows = [json.loads(x) for x in lines if '"kind":"step"' in x and x.endswith("\n")]
        return max((row["step"] for row in rows), default=0)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            for service in self._services:
                service.poll()
            if time.monotonic() - self._begin > self._limit_s:
                codes = {service.name: service.codes for service in self._services}
                why = f"not within {self._limit_s:g} s; step {self.step()}, codes {codes}"
                raise SystemExit(f"{what}: {why}")
            time.sleep(POLL_S)

    def until_steps(self, count: int, what: str) -> None:
        """Wait until so many more steps are made."""
        goal = self.step() + count
        self.until(lambda: self.step() >= goal, what)

    def until_ended(self, service: Service) -> None:
        """Wait until it ends once more."""
        count = len(service.codes)
        self.until(lambda: len(service.codes) > count, f"{service.name} ends")

    def finish(self) -> dict[str, list[int]]:
        """Wait for the run's end; return the exit codes of each service."""
        self.until(lambda: not any([service.poll() for service in self._services]), "the end")
        return {service.name: service.codes for service in self._services}
