"""Runs the compose files of a plan on nodes made of network namespaces; one is cut off.

    unshare --user --map-root-user --net --mount --kill-child python three_nodes.py PLAN SETTINGS

PLAN is what `umbra plan` wrote. Each node has a network namespace of its own on one bridge, with
its address, a mount namespace with its volumes and its own /dev/shm, and its name. What its compose
file says is started there: commands, environment files, volumes, restart policies and health
checks. SETTINGS is JSON: addresses by node; the node to cut off, after which step, and for how many
seconds, in which the others make a step at least; how long the whole may take. Prints one JSON
object.
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
    volumes = plan / "volumes"
    nodes = {name: Node(plan / name, name, a, volumes) for name, a in settings["nodes"].items()}
    services = [service for node in nodes.values() for service in node.services]
    cut = nodes[settings["cut"]]
    with World(services, volumes, "*/results/*/metrics.jsonl", settings["limit_s"]) as world:
        world.until_steps(settings["after_step"], "the step before the cut")
        healthy = {s.name: s.is_healthy() for s in services}
        outsiders = {s.name: s.is_healthy(keys=False) for s in cut.services}
        end, before = time.monotonic() + settings["cut_s"], world.step()
        cut.connect(connected=False)
        world.until(lambda: time.monotonic() > end, "the cut's end")
        world.until(lambda: world.step() > before, "a step without the node that is cut off")
        cut.connect(connected=True)
        codes = world.finish()
    return {"codes": codes, "healthy": healthy, "outsiders_answered": outsiders}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), json.loads(sys.argv[2]))))
