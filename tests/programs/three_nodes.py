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
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from programs.hosts_run import POLL_S, Service
from programs.network import Host, make_network


class Planned(Service):
    """A service of a compose file, restarted as Docker does it, with its health check."""

    def __init__(
        self, name: str, umbra: list[str], spec: dict[str, Any], environ: dict[str, str], log: Path
    ) -> None:
        policy, _, limit = spec["restart"].partition(":")
        assert policy == "on-failure"
        how: dict[str, Any] = {"restarts": int(limit), "final": (0,), "pause_s": 0.1, "growth": 2.0}
        super().__init__(name, [*umbra, *spec["command"]], log, environ, **how)
        self._health = [*umbra, *spec["healthcheck"]["test"][2:]]
        self._tries: int = spec["healthcheck"]["retries"]  # until it counts as unhealthy

    def is_healthy(self, *, keys: bool = True) -> bool:
        """Return the outcome of its health check; without `keys` as an unauthenticated peer."""
        environ = {k: v for k, v in self.environ.items() if keys or k != "UMBRA_SECURITY__KEYS"}
        return any(
            subprocess.run(
                self._health, env=environ, capture_output=True, timeout=600, check=False
            ).returncode
            == 0
            for _ in range(self._tries if keys else 1)
        )


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
        umbra = [*self.enter, sys.executable, "-m", "umbra"]
        self.services = [
            Planned(name, umbra, spec, self._environ(folder, spec), folder / f"{name}.log")
            for name, spec in file["services"].items()
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

    @staticmethod
    def _environ(folder: Path, spec: dict[str, Any]) -> dict[str, str]:
        environ = dict(os.environ)
        for file in spec["env_file"]:
            for line in (folder / file).read_text(encoding="utf-8").splitlines():
                key, _, value = line.partition("=")
                before = environ.get("PYTHONPATH") if key == "PYTHONPATH" else None
                environ[key] = f"{value}:{before}" if before else value
        return environ


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
            service.kill()

    def _services(self) -> list[Planned]:
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
