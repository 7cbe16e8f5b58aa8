"""Runs the compose files of a plan on nodes made of network namespaces; one is cut off.

    unshare --user --map-root-user --net --mount --kill-child python three_nodes.py PLAN SETTINGS

PLAN is what `umbra plan` wrote. Each node has a network namespace of its own on one bridge, with
its address, a mount namespace with its volumes and its own /dev/shm, and its name. What its compose
file says is started there: commands, environment files, volumes, restart policies and health
checks. SETTINGS is JSON: addresses by node; the node to cut off, after which step, for how many
seconds, and whether until the others have made a step at least (`goes_on`); how long the whole may
take. Prints one JSON object.
No container is made: images, users and limits are not tried.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from programs.network import Host, make_network

from umbra.services.process.parent import PARENT_PID_VARIABLE

POLL_S = 0.1


@dataclass
class Service:
    name: str
    argv: list[str]
    health: list[str]
    environ: dict[str, str]
    log: Path
    restarts_left: int
    tries: int  # of its health check, until it counts as unhealthy
    process: subprocess.Popen[bytes] | None = None
    codes: list[int] = field(default_factory=list[int])
    pause_s: float = 0.1  # doubles up to a minute, as Docker's does
    due: float = math.inf

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, env=self.environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def poll(self) -> bool:
        if self.process is not None and (code := self.process.poll()) is not None:
            self.codes.append(code)
            self.process = None
            if code != 0 and self.restarts_left > 0:
                self.restarts_left -= 1
                self.due = time.monotonic() + self.pause_s
                self.pause_s = min(60.0, 2 * self.pause_s)
        if self.due <= time.monotonic():
            self.due = math.inf
            self.start()
        return self.process is not None or self.due < math.inf

    def is_healthy(self, *, keys: bool = True) -> bool:
        """Return the outcome of its health check; without `keys` as an unauthenticated peer."""
        environ = {k: v for k, v in self.environ.items() if keys or k != "UMBRA_SECURITY__KEYS"}
        for _ in range(self.tries if keys else 1):
            done = subprocess.run(
                self.health, env=environ, capture_output=True, timeout=600, check=False
            )
            if done.returncode == 0:
                return True
        return False


class Node(Host):
    def __init__(self, folder: Path, name: str, address: str, volumes: Path) -> None:
        super().__init__(name, address)
        file = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))
        for service in file["services"].values():
            for volume in service["volumes"]:
                self._mount(folder, volume, file["volumes"], volumes)
            for secret in service.get("secrets", []):
                source = file["secrets"][secret["source"]]["file"]
                self._bind((folder / source).resolve(), secret["target"])
        self.services = [
            self._service(folder, name, service) for name, service in file["services"].items()
        ]

    def _mount(
        self, folder: Path, volume: dict[str, Any], named: dict[str, Any], volumes: Path
    ) -> None:
        target = volume["target"]
        if volume["type"] == "volume":
            if named[volume["source"]]:
                return  # shared memory, of which the node has its own
            source = volumes / self.name / volume["source"]
            source.mkdir(parents=True, exist_ok=True)
        else:
            source = (folder / volume["source"]).resolve()
        self._bind(source, target)

    def _bind(self, source: Path, target: str) -> None:
        if str(source) == target:
            return
        make = (
            f"mkdir -p {target}"
            if source.is_dir()
            else f"mkdir -p {Path(target).parent}; touch {target}"
        )
        self.sh(f"mountpoint -q {target} || {{ {make}; mount --bind {source} {target}; }}")

    def _service(self, folder: Path, name: str, service: dict[str, Any]) -> Service:
        umbra = [*self.enter, sys.executable, "-m", "umbra"]
        policy, _, limit = service["restart"].partition(":")
        assert policy == "on-failure"
        environ = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}
        for file in service["env_file"]:
            for line in (folder / file).read_text(encoding="utf-8").splitlines():
                key, _, value = line.partition("=")
                before = environ.get("PYTHONPATH") if key == "PYTHONPATH" else None
                environ[key] = f"{value}:{before}" if before else value
        return Service(
            name=name,
            argv=[*umbra, *service["command"]],
            health=[*umbra, *service["healthcheck"]["test"][2:]],
            environ=environ,
            log=folder / f"{name}.log",
            restarts_left=int(limit),
            tries=service["healthcheck"]["retries"],
        )


class World:
    def __init__(self, plan: Path, settings: dict[str, Any]) -> None:
        make_network()
        self.volumes = plan / "volumes"
        self.nodes = {
            name: Node(plan / name, name, address, self.volumes)
            for name, address in settings["nodes"].items()
        }
        self.settings = settings
        self.deadline = time.monotonic() + settings["limit_s"]

    def run(self) -> dict[str, Any]:
        """The run from start to end; what became of it."""
        cut = self.nodes[self.settings["cut"]]
        for node in self.nodes.values():
            for service in node.services:
                service.start()
        self._until(lambda: self.step() >= self.settings["after_step"], "the step before the cut")
        healthy = {s.name: s.is_healthy() for s in self._services()}
        outsiders = {s.name: s.is_healthy(keys=False) for s in cut.services}
        began, before = time.monotonic(), self.step()
        cut.connect(connected=False)
        long_enough = lambda: time.monotonic() - began >= self.settings["cut_s"]  # noqa: E731
        self._until(long_enough, "the cut's end")
        if self.settings.get("goes_on"):
            self._until(lambda: self.step() > before, "a step without the node that is cut off")
        during = self.step() - before
        cut.connect(connected=True)
        self._until(lambda: not any([s.poll() for s in self._services()]), "the end of the run")
        return {
            "codes": {service.name: service.codes for service in self._services()},
            "healthy": healthy,
            "outsiders_answered": outsiders,
            "steps_while_cut": during,
        }

    def step(self) -> int:
        rows = 0
        for path in self.volumes.glob("*/results/*/metrics.jsonl"):
            rows += path.read_text(encoding="utf-8").count('"kind":"step"')
        return rows

    def kill(self) -> None:
        for service in self._services():
            if service.process is not None:
                service.process.terminate()

    def _services(self) -> list[Service]:
        return [service for node in self.nodes.values() for service in node.services]

    def _until(self, condition: Any, what: str) -> None:
        while not condition():
            running = [service.name for service in self._services() if service.poll()]
            if time.monotonic() > self.deadline:
                raise SystemExit(f"{what} did not come in time; running: {running}")
            if what != "the end of the run" and "trainer" not in running:
                raise SystemExit(f"the trainer ended before {what}")
            time.sleep(POLL_S)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    world = World(Path(sys.argv[1]), json.loads(sys.argv[2]))
    try:
        print(json.dumps(world.run()))
    finally:
        world.kill()


if __name__ == "__main__":
    main()
