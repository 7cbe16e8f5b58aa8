"""Trainer ranks on two hosts made of network namespaces, one of which is cut off within a step.

    unshare --user --map-root-user --net --mount --uts --kill-child python two_hosts.py MODEL FOLDER

FOLDER is as for `trainer_rank.py`, whose case `cut` waits within an update until `is-cut` is there;
`again.json` has the cases of the second life. Each host has a network namespace on one bridge, a
name, and its own /dev/shm. Prints one JSON object: exit codes and errors of both lives, by rank.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from programs.three_nodes import BRIDGE, sh

ADDRESSES = {
    "alpha": "10.78.0.1",
    "beta": "10.78.0.2",
    "gamma": "10.78.0.3",
    "delta": "10.78.0.4",
}
RANKS = 2  # of each host
PORT = "29500"


class Host:
    """A machine: its namespaces, held by a process that sleeps in them."""

    def __init__(self, name: str) -> None:
        self._link = f"to-{name}"
        hold = f"hostname {name}; mount -t tmpfs tmpfs /dev/shm; echo up; exec cat"
        # It ends when we do, because then its input does.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "sh", "-ec", hold],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        pid = self._holder.pid
        self.enter = ["nsenter", f"--target={pid}", "--net", "--mount", "--uts", "--"]
        sh(
            f"ip link add {self._link} type veth peer name eth0 netns {pid};"
            f"ip link set {self._link} master {BRIDGE} up"
        )
        set_up = (
            f"ip addr add {ADDRESSES[name]}/24 dev eth0; ip link set eth0 up; ip link set lo up"
        )
        self.sh(set_up)

    def sh(self, command: str) -> None:
        sh(" ".join([*self.enter, "sh", "-ec", f"'{command}'"]))

    def connect(self, *, connected: bool) -> None:
        sh(f"ip link set {self._link} {'up' if connected else 'down'}")

    def start(self, node: int, argv: list[str]) -> list[subprocess.Popen[str]]:
        """Its ranks, as a launcher starts them."""
        place = {
            "MASTER_ADDR": ADDRESSES["alpha"],
            "MASTER_PORT": PORT,
            "WORLD_SIZE": str(2 * RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "OMP_NUM_THREADS": "1",
        }
        environ = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
        return [
            subprocess.Popen(
                [*self.enter, sys.executable, *argv],
                env=environ | place | {"RANK": str(node * RANKS + at), "LOCAL_RANK": str(at)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for at in range(RANKS)
        ]


def ended(ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """How they ended, in order."""
    said = [rank.communicate()[1] for rank in ranks]
    return [{"code": r.returncode, "error": e} for r, e in zip(ranks, said, strict=True)]


def make_network() -> None:
    """What the hosts are on."""
    sh(f"ip link add {BRIDGE} type bridge; ip link set {BRIDGE} up; ip link set lo up")


def main(model: str, folder: Path) -> None:
    make_network()
    alpha, beta = Host("alpha"), Host("beta")
    argv = [str(Path(__file__).with_name("trainer_rank.py")), model, str(folder)]
    found: dict[str, Any] = {}
    # The one that is there first waits for the other.
    later = beta.start(1, argv)
    ranks = alpha.start(0, argv) + later
    while not (folder / "is-there").exists():
        if any(rank.poll() is not None for rank in ranks):
            break
        time.sleep(0.05)
    beta.connect(connected=False)
    (folder / "is-cut").touch()
    found["first"] = ended(ranks)
    beta.connect(connected=True)
    shutil.copy(folder / "again.json", folder / "cases.json")
    ranks = beta.start(1, argv)
    found["second"] = ended(alpha.start(0, argv) + ranks)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
