"""The `umbra up` that a program has started: what it prints, and how it ends."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from umbra.proto.errors import ERROR_PREFIX
from umbra.services.process.child import ChildProcess, child_environ, umbra_argv

JOIN_S = 5.0


class RunChild:
    """`umbra up FOLDER` as our child: it ends, in order, when we are gone.

    What it prints goes where our own output goes: to the terminal, where it draws its live screen,
    or as lines through `sys.stdout`, which a notebook shows below its cell. The sentence with which
    it ends if something is wrong is not printed but kept, for the exception that tells it.

    Args:
        folder: the run's.
        flags: of `umbra up`.
        show: whether its progress is shown.
    """

    def __init__(self, folder: Path, *flags: str, show: bool = True) -> None:
        self.said = ""
        argv = umbra_argv("up", str(folder), *flags, *(() if show else ("--quiet",)))
        self._readers: list[threading.Thread] = []
        direct = _is_terminal()
        out, err = (None if direct else self._through(_print_out)), self._through(self._hear)
        try:
            self._child = ChildProcess(argv, environ=child_environ(), stdout=out, stderr=err)
        finally:
            for fd in (out, err):
                if fd is not None:
                    os.close(fd)

    def poll(self) -> int | None:
        code = self._child.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(JOIN_S)
        return code

    def terminate(self) -> None:
        """Ask it to end in order; the second time at once."""
        self._child.terminate()

    def _through(self, take: Callable[[str], None]) -> int:
        """Return the writing end of a pipe whose lines a thread gives to `take`."""
        reading, writing = os.pipe()

        def read() -> None:
            with open(reading, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    take(line.rstrip("\n"))

        self._readers.append(threading.Thread(target=read, name="umbra-up-output", daemon=True))
        self._readers[-1].start()
        return writing

    def _hear(self, line: str) -> None:
        if line.startswith(ERROR_PREFIX):
            self.said = line.removeprefix(ERROR_PREFIX)
        else:
            print(line, file=sys.stderr)


def _print_out(line: str) -> None:
    print(line, flush=True)


def _is_terminal() -> bool:
    """True if our standard output is a terminal, and not something put in its place."""
    return sys.stdout is sys.__stdout__ and sys.stdout.isatty()
