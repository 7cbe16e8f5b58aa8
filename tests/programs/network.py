"""Machines made of network namespaces on one bridge, each with a name and its own /dev/shm."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import IO

ADDRESSES = {"alpha": "10.78.0.1", "beta": "10.78.0.2", "gamma": "10.78.0.3", "delta": "10.78.0.4"}
BRIDGE = "umbra0"
NETWORK = "10.88.0"  # of machines that are not named so
CONTROLLER = f"{NETWORK}.254"  # ours among them


def sh(command: str) -> None:
    """Run a shell command; what it says on failure is the error."""
    done = subprocess.run(["sh", "-ec", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")


def make_network(address: str = "") -> None:
    """Make the bridge, on which we have `address`, if any."""
    own = f"ip addr add {address}/24 dev {BRIDGE};" if address else ""
    sh(f"ip link set lo up; ip link add {BRIDGE} type bridge; {own} ip link set {BRIDGE} up")


def plug(link: str, pid: int | str) -> None:
    """Connect the network of process `pid` to the bridge: our end is `link`, its end `eth0`."""
    sh(
        f"ip link add {link} type veth peer name eth0 netns {pid};"
        f"ip link set {link} master {BRIDGE} up"
    )


def start_machine(folder: Path, index: int, name: str, script: str, log: IO[bytes]) -> None:
    """Start a machine that does `script`; NAME.pid in `folder` is the process that holds it."""
    begin = (
        f"hostname {name}; echo $$ > {folder}/{name}.part;"
        f"mv {folder}/{name}.part {folder}/{name}.pid;"
        "until ip link set eth0 up 2>/dev/null; do sleep 0.05; done;"
        f"ip addr add {NETWORK}.{index}/24 dev eth0; ip link set lo up\n"
    )
    subprocess.Popen(
        ["unshare", "--net", "--mount", "--uts", "sh", "-ec", begin + script],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    pid = folder / f"{name}.pid"
    while not pid.exists():
        time.sleep(0.05)
    plug(f"to-{index}", pid.read_text(encoding="ascii").strip())


class Host:
    """A machine: its namespaces, held by a process that sleeps in them."""

    def __init__(self, name: str, address: str = "", link: str = "") -> None:
        self.name = name
        self._link = link or f"to-{name}"
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
        self.enter = ["nsenter", f"--target={self._holder.pid}", "--net", "--mount", "--uts", "--"]
        plug(self._link, self._holder.pid)
        own = f"{address or ADDRESSES[name]}/24"
        self.sh(f"ip addr add {own} dev eth0; ip link set eth0 up; ip link set lo up")

    def sh(self, command: str) -> None:
        sh(" ".join([*self.enter, "sh", "-ec", f"'{command}'"]))

    def connect(self, *, connected: bool) -> None:
        sh(f"ip link set {self._link} {'up' if connected else 'down'}")
