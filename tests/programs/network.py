"""Machines made of network namespaces on one bridge, each with a name and its own /dev/shm."""

from __future__ import annotations

import subprocess

ADDRESSES = {"alpha": "10.78.0.1", "beta": "10.78.0.2", "gamma": "10.78.0.3", "delta": "10.78.0.4"}
BRIDGE = "umbra0"


def sh(command: str) -> None:
    """Run a shell command; what it says on failure is the error."""
    done = subprocess.run(["sh", "-ec", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")


def make_network() -> None:
    sh(f"ip link add {BRIDGE} type bridge; ip link set {BRIDGE} up; ip link set lo up")


class Host:
    """A machine: its namespaces, held by a process that sleeps in them."""

    def __init__(self, name: str, address: str = "") -> None:
        self.name = name
        self._link = f"to-{name}"
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
        pid = self._holder.pid
        self.enter = ["nsenter", f"--target={pid}", "--net", "--mount", "--uts", "--"]
        sh(
            f"ip link add {self._link} type veth peer name eth0 netns {pid};"
            f"ip link set {self._link} master {BRIDGE} up"
        )
        own = f"{address or ADDRESSES[name]}/24"
        self.sh(f"ip addr add {own} dev eth0; ip link set eth0 up; ip link set lo up")

    def sh(self, command: str) -> None:
        sh(" ".join([*self.enter, "sh", "-ec", f"'{command}'"]))

    def connect(self, *, connected: bool) -> None:
        sh(f"ip link set {self._link} {'up' if connected else 'down'}")
