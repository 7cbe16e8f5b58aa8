"""Runs the compose files of a plan on hosts made of network namespaces, which are lost or cut off.

    unshare --user --map-root-user --net --mount --kill-child python planned_run.py PLAN SETTINGS

PLAN is what `umbra plan` wrote. Each node has a network namespace of its own on one bridge, with
its address, a mount namespace with its volumes and its own /dev/shm, and its name. What its compose
file says is started there: commands, environment files, volumes, and health checks. SETTINGS is
JSON: addresses of `nodes`; `limit_s`, how long the whole may take; and `events`, in this order:

    {"host": NAME, "steps": 3}                       lost after three more steps, for good
    {"host": NAME, "steps": 3, "back": {"steps": 2}}     back when the others have done two more
    {"host": NAME, "steps": 3, "back": {"ended": "trainer"}}   back when that one has noticed
    {"host": NAME, "steps": 3, "cut_s": 20}          cut off for so long, and a step of the others

A host that is lost falls silent: its link is down, then its processes are killed and its shared
memory is emptied. What fails is started again. Prints JSON: exit codes by process (what ended with
a lost host has none), and who was well before a host was cut off, or answered without keys.
No container is made: images, users and limits are not tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from programs.network import Host, Service, World, make_network


class Planned(Service):
    """A service of a compose file, with its health check."""

    def __init__(
        self, name: str, umbra: list[str], spec: dict[str, Any], environ: dict[str, str], log: Path
    ) -> None:
        super().__init__(name, [*umbra, *spec["command"]], log, environ)
        self._health = [*umbra, *spec["healthcheck"]["test"][2:]]
        self._tries: int = spec["healthcheck"]["retries"]  # until it counts as unhealthy

    def is_healthy(self, *, keys: bool = True) -> bool:
        """Return the outcome of its health check; without `keys` as an unauthenticated peer."""
        environ = {k: v for k, v in self.environ.items() if keys or k != "UMBRA_SECURITY__KEYS"}
        how: dict[str, Any] = {"env": environ, "capture_output": True, "timeout": 600}
        tries = range(self._tries if keys else 1)
        return any(not subprocess.run(self._health, **how).returncode for _ in tries)


class Node(Host):
    def __init__(self, folder: Path, name: str, address: str, volumes: Path) -> None:
        super().__init__(name, address)
        file = yaml.safe_load((folder / "compose.yaml").read_text(encoding="utf-8"))
        for service in file["services"].values():
            for secret in service.get("secrets", []):
                self._bind(folder / file["secrets"][secret["source"]]["file"], secret["target"])
            for volume in service["volumes"]:
                source = folder / volume["source"]
                if volume["type"] == "volume":
                    if file["volumes"][volume["source"]]:
                        continue  # shared memory, of which the node has its own
                    source = volumes / name / volume["source"]
                    source.mkdir(parents=True, exist_ok=True)
                self._bind(source, volume["target"])
        umbra = [*self.enter, sys.executable, "-m", "umbra"]
        self.services = [
            Planned(name, umbra, spec, self._environ(folder, spec), folder / f"{name}.log")
            for name, spec in file["services"].items()
        ]

    def _bind(self, source: Path, target: str) -> None:
        source = source.resolve()
        if str(source) != target:
            make = f"mkdir -p {Path(target).parent}; touch {target}"
            make = f"mkdir -p {target}" if source.is_dir() else make
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


def run(plan: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The run from start to end; what became of it."""
    make_network()
    volumes, found = plan / "volumes", dict[str, Any]()
    nodes = {name: Node(plan / name, name, a, volumes) for name, a in settings["nodes"].items()}
    services = {service.name: service for node in nodes.values() for service in node.services}
    metrics = "*/results/*/metrics.jsonl"
    with World([*services.values()], volumes, metrics, settings["limit_s"]) as world:
        for event in settings["events"]:
            name, node, back = event["host"], nodes[event["host"]], event.get("back", {})
            world.until_steps(event["steps"], f"{name} is lost")
            if "cut_s" in event:
                found["healthy"] = {s.name: s.is_healthy() for s in services.values()}
                found["outsiders"] = {s.name: s.is_healthy(keys=False) for s in node.services}
                node.connect(connected=False)
                end = time.monotonic() + event["cut_s"]
                world.until_steps(1, f"a step without {name}")
                world.until(lambda end=end: time.monotonic() > end, "the cut's end")
                node.connect(connected=True)
                continue
            node.connect(connected=False)
            for service in node.services:
                service.kill()
            node.sh("umount -l /dev/shm; mount -t tmpfs tmpfs /dev/shm")
            if "steps" in back:
                world.until_steps(back["steps"], f"{name} is back")
            elif "ended" in back:
                world.until_ended(services[back["ended"]])
            if back:
                node.connect(connected=True)
                for service in node.services:
                    service.start()
        return {**found, "codes": world.finish()}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), json.loads(sys.argv[2]))))
