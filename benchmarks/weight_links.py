"""Network namespaces joined by a bridge, each with a link of a given rate: nodes on one machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

PREFIX = "umbra"
BURST_S = 0.002  # what a link lets pass at once


def why_not() -> str:
    """Why shaped links cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (package iproute2)"
    try:
        with Links(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


class Links:
    """Nodes 0 to `count` - 1, each a namespace with one interface shaped both ways.

    This process reaches them too, by `gateway` on `bridge`, without a limit of its own.
    """

    def __init__(self, count: int, gbit: float = 1) -> None:
        self._count = count
        self._rate = gbit * 1e9  # bit/s
        self._bridge = f"{PREFIX}{os.getpid()}"
        self._network = f"10.77.{100 + os.getpid() % 100}"

    @property
    def bridge(self) -> str:
        """The interface of this process."""
        return self._bridge

    @property
    def gateway(self) -> str:
        """The address of this process."""
        return f"{self._network}.254"

    def address(self, node: int) -> str:
        """Of a node, on the bridge's network."""
        return f"{self._network}.{node + 1}"

    def namespace(self, node: int) -> str:
        """The network namespace of a node."""
        return f"{self._bridge}-{node}"

    def __enter__(self) -> Links:
        _clear()
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "addr", "add", f"{self.gateway}/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")
            for node in range(self._count):
                self._add(node)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _add(self, node: int) -> None:
        name, outer = self.namespace(node), f"{self._bridge}-{node}"
        inside = ("ip", "netns", "exec", name)
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", outer, "master", self._bridge, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        _run(*inside, "ip", "link", "set", "eth0", "up")
        rate, burst = f"{self._rate:.0f}bit", f"{max(256e3, BURST_S * self._rate / 8):.0f}b"
        shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")
        _run("tc", "qdisc", "add", "dev", outer, *shape)
        _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)

    def _remove(self) -> None:
        _delete([self.namespace(node) for node in range(self._count)], self._bridge)


def _clear() -> None:
    """Remove what a process that was killed has left: its network would get our packets."""
    for bridge in Path("/sys/class/net").glob(f"{PREFIX}*"):
        match = re.fullmatch(rf"{PREFIX}(\d+)", bridge.name)
        if match and not Path("/proc", match[1]).exists():
            nodes = Path("/run/netns").glob(f"{bridge.name}-*")
            _delete([node.name for node in nodes], bridge.name)


def _delete(nodes: list[str], bridge: str) -> None:
    for node in nodes:  # the link first: a namespace goes later, and its links' names with it
        subprocess.run(["ip", "link", "del", node], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", node], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
