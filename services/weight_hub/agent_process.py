"""An agent as its owner sees it: orders with deadlines, killed when it misses one, started anew."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from umbra.proto.errors import DeadlineError, PeerLostError, UmbraError

AGENT = ("-m", "umbra.services.weight_hub.nccl_agent")
READ_BYTES = 1 << 16
END_S = 5.0


class AgentProcess:
    """One agent process; a hung one costs a restart and nothing else.

    Args:
        device: index of its GPU.
        environ: added to its environment.
        program: what Python is to run, for tests.
    """

    def __init__(
        self, device: int, environ: Mapping[str, str] | None = None, program: Sequence[str] = AGENT
    ) -> None:
        self.starts = 0
        self._argv = [sys.executable, *program, str(device)]
        self._environ = {**os.environ, **(environ or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._text = b""
        self._pending = 0  # answers that nobody has waited for yet

    @property
    def pid(self) -> int | None:
        """Of the process, if it runs."""
        return self._process.pid if self._process is not None else None

    def order(self, op: str, **arguments: Any) -> None:
        """Give an order; starts the agent if none runs. The answer is for `answer`."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            self.kill()
            raise PeerLostError(f"the NCCL agent ended before the order {op!r}") from error
        self._pending += 1

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The answer to the oldest order that has none yet.

        Raises:
            DeadlineError: none came in time; the agent was killed.
            PeerLostError: the agent has ended.
            UmbraError: it says what went wrong.
        """
        if self._process is None or self._pending == 0:
            raise PeerLostError("the NCCL agent does not run, or has no order")
        until = time.monotonic() + timeout_s
        while b"\n" not in self._text:
            self._text += self._read(until, timeout_s)
        line, _, self._text = self._text.partition(b"\n")
        self._pending -= 1
        found = json.loads(line)
        if error := found.get("error"):
            raise UmbraError(f"NCCL agent: {error}")
        return found

    def call(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """`order` and `answer` in one."""
        self.order(op, **arguments)
        return self.answer(timeout_s)

    def kill(self) -> None:
        """End it at once; the next order starts another."""
        process, self._process = self._process, None
        self._text, self._pending = b"", 0
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # it held an order that was never read
        process.wait(END_S)

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self._environ
        )
        return self._process

    def _read(self, until: float, timeout_s: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(max(0.0, until - time.monotonic()))
        data = os.read(self._process.stdout.fileno(), READ_BYTES) if ready else None
        if data:
            return data
        self.kill()
        if data is None:
            raise DeadlineError(f"no answer from the NCCL agent within {timeout_s:g} s: killed")
        raise PeerLostError("the NCCL agent has ended")
