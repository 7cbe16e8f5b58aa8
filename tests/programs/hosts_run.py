"""A run with a trainer on two hosts, made of network namespaces; hosts are lost one after another.

    unshare --user --map-root-user --net --mount --uts --kill-child python hosts_run.py FOLDER JSON

FOLDER has `run.toml`. Host alpha has the buffer, the weight hub and node 0 of the trainer, beta
node 1 and its part hub, gamma and delta a generator each; each has its own /dev/shm and its own
folder for results. The JSON says which hosts there are (`hosts`), which of them have a relay
(`relays`), how long the whole may take (`limit_s`), and which are lost (`losses`), in this order:

    {"host": NAME, "steps": 3}                      lost after three more steps, for good
    {"host": NAME, "steps": 3, "back": {"steps": 2}}         back when the others have done two more
    {"host": NAME, "steps": 3, "back": {"ended": "beta/trainer"}}   back when that one has noticed

A host that is lost falls silent: its link is down, then its processes are killed and its shared
memory is emptied. What fails is started again, as a launcher would. Prints one JSON object: exit
codes by process; what ended with a lost host has none.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from programs.network import ADDRESSES, Host, make_network

from umbra.services.process.parent import PARENT_PID_VARIABLE
from umbra.services.process.supervisor import FINAL_CODES

POLL_S = 0.1


class Service:
    """A process that is started again when it has failed, as by a launcher.

    Args:
        name: of it.
        argv: its command.
        log: gets its output.
        environ: its environment variables.
        restarts: how often it is started again.
        final: codes after which it is not.
        pause_s: until it is started again; each time `growth` times longer, up to a minute.
        growth: of the pause.
    """

    def __init__(
        self,
        name: str,
        argv: list[str],
        log: Path,
        environ: Mapping[str, str] = os.environ,
        *,
        restarts: int = 20,
        final: Collection[int] = (0, *FINAL_CODES),
        pause_s: float = 1.0,
        growth: float = 1.0,
    ) -> None:
        self.name = name
        self.codes: list[int] = []
        self._argv, self._log = argv, log
        self.environ = {**environ, PARENT_PID_VARIABLE: str(os.getpid())}  # it ends with us
        self._restarts, self._final = restarts, final
        self._pause_s, self._growth = pause_s, growth
        self._process: subprocess.Popen[bytes] | None = None
        self._due = math.inf

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv,
                env=self.environ,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def poll(self) -> bool:
        """Start it again if that is due; whether it runs, or will."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self.codes.append(code)
            self._process = None
            if code not in self._final and len(self.codes) <= self._restarts:
                self._due = time.monotonic() + self._pause_s
                self._pause_s = min(60.0, self._growth * self._pause_s)
        if self._due <= time.monotonic():
            self._due = math.inf
            self.start()
        return self._process is not None or self._due < math.inf

    def kill(self) -> None:
        """End it; only `start` starts it again."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process, self._due = None, math.inf


def services(folder: Path, hosts: dict[str, Host], relays: list[str]) -> dict[str, list[Service]]:
    """Return the services on each of `hosts`."""
    alpha, beta = ADDRESSES["alpha"], ADDRESSES["beta"]
    hub = f"tcp://{alpha}:5560"
    listen = ["--set", "weight_hub.listen=tcp://0.0.0.0:5560", "--advertise", alpha]
    wanted = {
        "alpha": {
            "buffer": [
                *("buffer", "--broker", "tcp://0.0.0.0:5555"),
                *("--set", "buffer.ports=[5556,5557]"),
                *("--advertise", alpha, "--set", f"buffer.store={folder}/store"),
            ],
            "weight-hub": ["weight-hub", *listen],
            "trainer": ["trainer", "--node-rank", "0"],
        },
        "beta": {
            "part": [
                *("weight-hub", "--upstream", hub, "--set", f"weight_hub.listen=tcp://{beta}:5562"),
                *("--owner", "1"),
            ],
            "trainer": ["trainer", "--node-rank", "1"],
        },
    }
    for host in [name for name in hosts if name not in wanted]:
        wanted[host] = {}
        if host in relays:
            own = f"weight_hub.listen=tcp://{ADDRESSES[host]}:5563"
            wanted[host]["relay"] = ["weight-hub", "--upstream", hub, "--set", own]
        wanted[host]["generator"] = ["generator"]
    made: dict[str, list[Service]] = {}
    for host, those in wanted.items():
        made[host] = []
        for name, argv in those.items():
            common = ["--config", str(folder / "run.toml"), "--set", "security.insecure=true"]
            common += ["--run-dir", str(folder / host / "run")]
            if name != "buffer":
                common += ["--broker", f"tcp://{alpha}:5555"]
            if name != "part":
                common += ["--name", name if host in ("alpha", "beta") else f"{name}-{host}"]
            whole = [*hosts[host].enter, sys.executable, "-m", "umbra", *argv, *common]
            log = folder / f"{host}-{name}.log"
            made[host].append(Service(f"{host}/{name}", whole, log))
    return made


class World:
    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        make_network()
        self._folder = folder
        self._hosts = {name: Host(name) for name in settings["hosts"]}
        for name in self._hosts:
            (folder / name).mkdir()
        self._run = services(folder, self._hosts, settings["relays"])
        self._every = {one.name: one for those in self._run.values() for one in those}
        self._limit_s = settings["limit_s"]
        self._deadline = time.monotonic() + self._limit_s

    def run(self, losses: list[dict[str, Any]]) -> dict[str, list[int]]:
        """The run from start to end; exit codes by process."""
        for service in self._every.values():
            service.start()
        for loss in losses:
            host = loss["host"]
            self._until_steps(loss["steps"], f"{host} is lost")
            self._lose(host)
            match loss.get("back"):
                case {"steps": count}:
                    self._until_steps(count, f"{host} is back")
                    self._return(host)
                case {"ended": name}:
                    noticed = len(self._every[name].codes)
                    self._until(lambda n=name, c=noticed: len(self._every[n].codes) > c, host)
                    self._return(host)
                case _:
                    pass
        self._until(lambda: not any([one.poll() for one in self._every.values()]), "the end")
        return {name: service.codes for name, service in self._every.items()}

    def kill(self) -> None:
        for service in self._every.values():
            service.kill()

    def _lose(self, host: str) -> None:
        self._hosts[host].connect(connected=False)
        for service in self._run[host]:
            service.kill()
        self._hosts[host].sh("umount -l /dev/shm; mount -t tmpfs tmpfs /dev/shm")

    def _return(self, host: str) -> None:
        self._hosts[host].connect(connected=True)
        for service in self._run[host]:
            service.start()

    def _step(self) -> int:
        path = self._folder / "alpha" / "run" / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines if '"kind":"step"' in line and line[-1] == "}"]
        return max((row["step"] for row in rows), default=0)

    def _until_steps(self, count: int, what: str) -> None:
        goal = self._step() + count
        self._until(lambda: self._step() >= goal, what)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            for service in self._every.values():
                service.poll()
            if time.monotonic() > self._deadline:
                codes = {name: service.codes for name, service in self._every.items()}
                raise SystemExit(
                    f"{what}: not within {self._limit_s:g} s; step {self._step()}, codes {codes}"
                )
            time.sleep(POLL_S)


def main(folder: Path, settings: dict[str, Any]) -> None:
    world = World(folder, settings)
    try:
        print(json.dumps(world.run(settings["losses"])))
    finally:
        world.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
