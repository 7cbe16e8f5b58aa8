"""The processes of the benchmark of weight pushes, forked from one that has imported everything.

Importing takes longer than most pushes. `weight_push.py nursery` is that process: it computes
nothing and has no thread, and forks a role (`weight_roles.py`) for each order that it gets.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

SCRIPT = Path(__file__).with_name("weight_push.py")
NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
ORDER_BYTES = 1 << 17
END_S = 10.0


class Role:
    """A process of the benchmark; lines of JSON come out of it. It ends when its stdin does.

    Args:
        arguments: the name of the role, and what its function takes.
        namespace: the network namespace that it runs in; "" = ours.
        environ: added to our environment.
    """

    def __init__(
        self, *arguments: object, namespace: str = "", environ: Mapping[str, str] | None = None
    ) -> None:
        self._name = " ".join(map(str, arguments))
        self._socket, theirs = socket.socketpair()
        order = {
            "arguments": list(map(str, arguments)),
            "namespace": namespace,
            "environ": {**os.environ, **(environ or {})},
        }
        with theirs:
            self._pid = _nursery().fork(order, theirs)
        self._lines = self._socket.makefile("r", encoding="utf-8")

    def hear(self) -> dict[str, Any]:
        """Its next line."""
        line = self._lines.readline()
        if not line:
            raise RuntimeError(f"{self._name} has ended")
        return json.loads(line)

    def tell(self, text: str) -> None:
        """A line to its stdin."""
        self._socket.sendall(f"{text}\n".encode())

    @property
    def cpu_s(self) -> float:
        """Its CPU time so far."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(END_S)
            while self._socket.recv(4096):
                pass
        except TimeoutError:
            os.kill(self._pid, signal.SIGKILL)
        except OSError:
            pass  # it has ended
        self._lines.close()
        self._socket.close()


class _Nursery:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen([sys.executable, str(SCRIPT), "nursery"], stdin=theirs.fileno())

    def fork(self, order: dict[str, Any], channel: socket.socket) -> int:
        """Start a role whose stdin and stdout are `channel`; its pid."""
        socket.send_fds(self._socket, [json.dumps(order).encode()], [channel.fileno()])
        answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the process that forks the others has ended")
        return int(answer)


@cache
def _nursery() -> _Nursery:
    return _Nursery()


def serve(roles: Mapping[str, Callable[..., None]]) -> None:
    """Fork a role for each order on stdin, until that ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    orders = socket.socket(fileno=0)
    while True:
        order, channels, _, _ = socket.recv_fds(orders, ORDER_BYTES, 1)
        if not order:
            return
        pid = os.fork()
        if pid == 0:
            _become(roles, json.loads(order), channels[0])
        os.close(channels[0])
        orders.send(str(pid).encode())


def _become(
    roles: Mapping[str, Callable[..., None]], order: dict[str, Any], channel: int
) -> NoReturn:
    """Be a role, in the process just forked."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(order["environ"])
        if order["namespace"]:
            _enter(order["namespace"])
        for number in (0, 1):
            os.dup2(channel, number)
        os.close(channel)
        sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
        name, *arguments = order["arguments"]
        roles[name](*arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may get back into the code that forked
        traceback.print_exc()
    finally:
        os._exit(code)


def _enter(namespace: str) -> None:
    with (NAMESPACES / namespace).open("rb") as opened:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(opened.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"network namespace {namespace}")
