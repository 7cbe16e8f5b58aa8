"""A run with a trainer on two hosts, made of network namespaces; one is lost in the middle.

    unshare --user --map-root-user --net --mount --uts --kill-child python hosts_run.py FOLDER JSON

FOLDER has `run.toml`. Host alpha has the buffer, the weight hub and node 0 of the trainer, beta
node 1 and its part hub, gamma a generator; each has its own /dev/shm and its own folder for
results. The JSON says after which step beta is lost, and how long the whole may take. Beta's
processes are killed and its shared memory is emptied; then it starts again. What fails is started
again, as `umbra keep` would. Prints one JSON object: exit codes by process.
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

from programs.two_hosts import ADDRESSES, Host, make_network

from umbra.services.runtime.process.parent import PARENT_PID_VARIABLE
from umbra.services.runtime.process.supervisor import FINAL_CODES

POLL_S = 0.1
PAUSE_S = 1.0  # until what has failed is started again
RESTARTS = 20


class Service:
    """A process of a host, started again when it fails."""

    def __init__(self, name: str, argv: list[str], log: Path) -> None:
        self.name = name
        self.codes: list[int] = []
        self._argv, self._log = argv, log
        self._process: subprocess.Popen[bytes] | None = None
        self._again = 0.0

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                env={**os.environ, PARENT_PID_VARIABLE: str(os.getpid())},  # it ends with us
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def poll(self) -> bool:
        """Whether it runs, or will."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self.codes.append(code)
            self._process = None
            self._again = time.monotonic() + PAUSE_S if code not in (0, *FINAL_CODES) else 0.0
        if self._process is None and self._again and len(self.codes) <= RESTARTS:
            if time.monotonic() >= self._again:
                self._again = 0.0
                self.start()
            return True
        return self._process is not None

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def services(folder: Path, hosts: dict[str, Host]) -> dict[str, list[Service]]:
    """What runs on each host."""
    alpha, beta = ADDRESSES["alpha"], ADDRESSES["beta"]
    hub = f"tcp://{alpha}:5560"
    listen = ["--listen", "tcp://0.0.0.0:5560", "--advertise", alpha]
    wanted = {
        "alpha": {
            "buffer": [
                *("buffer", "--broker", "tcp://0.0.0.0:5555", "--ports", "[5556,5557,5558]"),
                *("--advertise", alpha, "--store", str(folder / "store")),
            ],
            "weight-hub": ["weight-hub", *listen, "--buckets-listen", "tcp://0.0.0.0:5561"],
            "trainer": ["trainer", "--node-rank", "0"],
        },
        "beta": {
            "part": [
                *("weight-hub", "part", "--hub", hub, "--listen", f"tcp://{beta}:5562"),
                *("--owner", "1"),
            ],
            "trainer": ["trainer", "--node-rank", "1"],
        },
        "gamma": {"generator": ["generator"]},
    }
    made: dict[str, list[Service]] = {}
    for host, those in wanted.items():
        made[host] = []
        for name, argv in those.items():
            common = ["--config", str(folder / "run.toml"), "--insecure"]
            common += ["--run-dir", str(folder / host / "run")]
            if name != "buffer":
                common += ["--broker", f"tcp://{alpha}:5555"]
            if name != "part":
                common += ["--name", name]
            whole = [*hosts[host].enter, sys.executable, "-m", "umbra", *argv, *common]
            log = folder / f"{host}-{name}.log"
            made[host].append(Service(f"{host}/{name}", whole, log))
    return made


def steps(folder: Path) -> int:
    """Optimizer steps so far."""
    path = folder / "alpha" / "run" / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count('"kind":"step"') if path.exists() else 0


def main(folder: Path, settings: dict[str, Any]) -> None:
    make_network()
    hosts = {name: Host(name) for name in ADDRESSES}
    for name in hosts:
        (folder / name).mkdir()
    run = services(folder, hosts)
    every = [service for those in run.values() for service in those]
    deadline, lost = time.monotonic() + settings["limit_s"], False
    try:
        for service in every:
            service.start()
        while any([service.poll() for service in every]):
            if time.monotonic() > deadline:
                codes = {service.name: service.codes for service in every}
                raise SystemExit(f"no end after {steps(folder)} steps: {codes}")
            if not lost and steps(folder) >= settings["after_step"]:
                lost = True
                for service in run["beta"]:
                    service.kill()
                hosts["beta"].sh("umount -l /dev/shm; mount -t tmpfs tmpfs /dev/shm")
            time.sleep(POLL_S)
        print(json.dumps({service.name: service.codes for service in every}))
    finally:
        for service in every:
            service.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
