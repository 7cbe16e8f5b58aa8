"""The run that `chaos.py` disturbs: `umbra up`, and workers that join it from a second node.

The second node is a mount namespace with a /dev/shm of its own, as a container has: weights reach
it over TCP, through a relay.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import chaos_audit
from report import free_port

from umbra.proto.deadline import Deadline
from umbra.proto.errors import UmbraError
from umbra.proto.messages import Status
from umbra.proto.net.keys import OPEN
from umbra.services.monitor.client import StatusClient
from umbra.services.process.child import child_environ
from umbra.services.process.parent import PARENT_PID_VARIABLE

AUDITED = (sys.executable, str(Path(chaos_audit.__file__)))
LOOK_S = 0.5
RESTART_S = 0.5
# For everything to end after `umbra up` has: who joins as the buffer goes looks for it for a minute
# (`run.broker_grace_s`), and comes up slowly beside all others.
GONE_S = 120.0
RELAY = "relay-b"


class SecondNode:
    """Memory of its own for the processes that are started in it."""

    def __init__(self) -> None:
        hold = "mount -t tmpfs tmpfs /dev/shm; echo up; exec cat"  # until our end of it is closed
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", hold],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._holder.stdout is not None
        if not self._holder.stdout.readline():
            raise SystemExit("unshare can make no mount namespace here")
        where = f"--target={self._holder.pid}"
        self.enter = ["nsenter", where, "--user", "--preserve-credentials", "--mount", "--"]

    def close(self) -> None:
        """End it; nothing of ours may run in it any more."""
        self._holder.communicate()


@dataclass
class Worker:
    """A process of the second node; it is started again when it fails."""

    name: str
    argv: list[str]
    log: Path
    environ: dict[str, str]
    popen: subprocess.Popen[bytes] | None = None
    restart_at: float = 0.0
    codes: list[int] = field(default_factory=list[int])

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                self.argv, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def poll(self, now: float) -> bool:
        """Restart it if that is due; return whether it runs, or will again."""
        if self.popen is None:
            if self.codes[-1] and now >= self.restart_at:
                self.start()
        elif (code := self.popen.poll()) is not None:
            self.codes.append(code)
            self.popen, self.restart_at = None, now + RESTART_S
        return self.popen is not None or bool(self.codes and self.codes[-1])


class DemoRun:
    """One run in `folder`, whose run.toml is there.

    Args:
        hub: address of its weight hub, from run.toml.
        node: where the workers are that join, if any do.
    """

    def __init__(self, folder: Path, hub: str, node: SecondNode | None) -> None:
        self.home = folder
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.hub = hub
        self._node = node
        self.broker = ""
        self.relay = ""  # its address, if there is one
        self.workers: dict[str, Worker] = {}
        self.lives = 0  # of `umbra up`
        self._up: subprocess.Popen[bytes] | None = None
        self._client: StatusClient | None = None
        self._joined = 0

    @property
    def folder(self) -> Path:
        """Return the folder that `umbra up` has made."""
        (found,) = (self.home / "runs").iterdir()
        return found

    # -- start and end ----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the run, or go on with it; returns when its buffer can be asked."""
        what = str(self.folder) if self.lives else "run.toml"
        self.lives += 1
        with (self.home / "up.log").open("ab") as log:
            self._up = subprocess.Popen(
                [*AUDITED, "up", what],
                cwd=self.home,
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        while not self.broker:
            assert self._up.poll() is None, f"umbra up ended: {self.said()}"
            text = (self.home / "up.log").read_text(encoding="utf-8")
            if "to watch it:" in text:
                self.broker = text.split("its buffer at ")[1].split()[0]
                self._client = StatusClient(self.broker, OPEN)
            time.sleep(LOOK_S / 2)

    def join(self, kind: str) -> str:
        """Start a generator, a scorer or the relay on the second node; its name."""
        self._joined += 1
        name = RELAY if kind == "relay" else f"{kind}-b{self._joined}"
        common = ["--config", str(self.folder / "config.json"), "--broker", self.broker]
        common += ["--name", name, "--run-dir", str(self.folder)]
        if kind == "relay":
            self.relay = self.relay or f"tcp://127.0.0.1:{free_port()}"
            own = ["weight-hub", "--upstream", self.hub, "--set", f"weight_hub.listen={self.relay}"]
        else:
            own = [kind] if kind == "generator" else [kind, "--stage", "reward"]
        assert self._node is not None
        argv = [*self._node.enter, *AUDITED, *own, *common]
        worker = Worker(name, argv, self.folder / "logs" / f"{name}.log", self._environ())
        worker.start()
        self.workers[name] = worker
        return name

    def _environ(self) -> dict[str, str]:
        own = {PARENT_PID_VARIABLE: str(os.getpid()), chaos_audit.VARIABLE: str(self.notes)}
        return {**child_environ(), **own}

    def poll(self) -> int | None:
        """Keep the workers running; the exit code of `umbra up`, or None while it runs."""
        now = time.monotonic()
        for name, worker in list(self.workers.items()):
            if not worker.poll(now):
                del self.workers[name]
        assert self._up is not None
        return self._up.poll()

    def await_code(self, seconds: float) -> int:
        """Await the exit code of `umbra up`, which is to end within so many seconds.

        Raises:
            SystemExit: it does not.
        """
        deadline = Deadline(seconds)
        while (code := self.poll()) is None:
            if deadline.passed:
                log = self.home / "up.log"
                raise SystemExit(f"the run does not end: {self.said()} (see {log})")
            time.sleep(LOOK_S / 5)
        return code

    def await_end(self, *, of_all: bool) -> list[str]:
        """`umbra up` has ended: wait for its processes, or all; those that outlive it for long."""
        deadline = time.monotonic() + GONE_S
        while left := [name for name in self.pids() if of_all or name not in self.workers]:
            if time.monotonic() > deadline:
                return sorted(left)
            time.sleep(LOOK_S / 5)
        return []

    def close(self) -> None:
        """End whatever is left, at once."""
        if self._client is not None:
            self._client.close()
        for pid in [*self.pids().values(), *([self._up.pid] if self._up else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for popen in [self._up, *(worker.popen for worker in self.workers.values())]:
            if popen is not None:
                popen.wait()

    # -- looking and disturbing -------------------------------------------------------------------

    def look(self) -> Status | None:
        """Return the run as its buffer sees it; None if that does not answer."""
        assert self._client is not None
        try:
            return self._client.status(LOOK_S)
        except UmbraError:
            return None

    def pids(self) -> dict[str, int]:
        """Return all processes of the run but `umbra up` itself, by name."""
        config = str(self.home / "runs")
        found: dict[str, int] = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "--name" in words and any(word.startswith(config) for word in words):
                found[words[words.index("--name") + 1]] = int(path.parent.name)
        return found

    def signal(self, name: str, number: signal.Signals) -> bool:
        """Send a signal to the process called `name`; whether there was one. "run": `umbra up`."""
        assert self._up is not None
        pid = self._up.pid if name == "run" else self.pids().get(name)
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def drain(self, member: str) -> None:
        """`umbra drain`: of one member, or of the whole run."""
        assert self._client is not None
        self._client.drain(10.0, member=member, reason="chaos")

    def said(self) -> str:
        """Return the last line of `umbra up`."""
        lines = (self.home / "up.log").read_text(encoding="utf-8").splitlines()
        return lines[-1] if lines else "nothing"
