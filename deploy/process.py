"""One child process: its log, its ready line, its end and what it used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbra.proto.errors import PeerLostError, UmbraError
from umbra.services.runtime.config.loader import ENV_PREFIX
from umbra.services.runtime.process.command import READY_FD_VARIABLE
from umbra.services.runtime.process.parent import PARENT_PID_VARIABLE


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process used: wall-clock and CPU seconds (user + system, its children included)."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


class ChildProcess:
    """A running child, in a session of its own so that Ctrl-C in the terminal reaches only us.

    Make it in the main thread: the kernel's parent-death signal follows the thread that forked.

    Args:
        argv: the command.
        log_path: receives stdout and stderr, appended.
        environ: of the child; what a supervisor adds is added here.
        stdout_path: receives stdout instead, if given.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log_path: Path,
        environ: Mapping[str, str],
        stdout_path: Path | None = None,
    ) -> None:
        self._ready_fd, child_end = os.pipe()
        os.set_blocking(self._ready_fd, False)
        self._ready_line = b""
        self._started = time.monotonic()
        self.returncode: int | None = None
        self.usage = Usage()
        self._popen: subprocess.Popen[bytes] | None = None
        variables = {
            **environ,
            READY_FD_VARIABLE: str(child_end),
            PARENT_PID_VARIABLE: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        try:
            self.pid = self._spawn(
                list(argv), variables, log_path, stdout_path or log_path, child_end
            )
        except BaseException:
            os.close(self._ready_fd)
            raise
        finally:
            os.close(child_end)

    def _spawn(
        self,
        argv: list[str],
        environ: dict[str, str],
        log_path: Path,
        stdout_path: Path,
        ready_fd: int,
    ) -> int:
        """Start the child, the leader of a process group, with `ready_fd` open; its pid."""
        with log_path.open("ab") as log, stdout_path.open("ab") as out:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env=environ,
                pass_fds=(ready_fd,),
                start_new_session=True,
            )
        return self._popen.pid

    def ready(self) -> dict[str, Any] | None:
        """What the child said when it was up; None before that."""
        if not self._ready_line.endswith(b"\n") and self._ready_fd >= 0:
            try:
                self._ready_line += os.read(self._ready_fd, 65536)
            except BlockingIOError:
                return None
        return json.loads(self._ready_line) if self._ready_line.endswith(b"\n") else None

    def poll(self) -> int | None:
        """The exit code (negative: the signal that ended it), or None while it runs.

        What is left of its process group ends with it.
        """
        if self.returncode is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, options) is None:
                return None
            # Before it is reaped: until then its process group id cannot be given to others.
            self._signal_group(signal.SIGKILL)
            _, status, used = os.wait4(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            if self._popen:
                self._popen.returncode = self.returncode  # else it would wait for it as well
            wall_s = time.monotonic() - self._started
            self.usage = Usage(wall_s, used.ru_utime + used.ru_stime)
            self._close()
        return self.returncode

    def terminate(self) -> None:
        """Ask it to drain."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it, and whatever it started, at once."""
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            pass  # nothing is left of it, or only what is on its way out

    def _close(self) -> None:
        self.ready()
        os.close(self._ready_fd)
        self._ready_fd = -1


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def own_exit_code(code: int) -> int:
    """What we end with because a child ended with `code`."""
    if code == 1:
        return UmbraError.exit_code  # 1 is Python's own, after a traceback
    return code if code > 0 else PeerLostError.exit_code


def child_environ(search: Sequence[Path] = ()) -> dict[str, str]:
    """The environment of our children.

    `UMBRA_SECTION__KEY` variables are left out: they are part of the resolved configuration already
    and would outrank what a flag said. `search` is put in front of the module search path.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(ENV_PREFIX) and "__" in name)
    }
    paths = [str(path) for path in search]
    if before := environ.get("PYTHONPATH"):
        paths.append(before)
    if paths:
        environ["PYTHONPATH"] = os.pathsep.join(paths)
    return environ


def umbra_argv(*arguments: str) -> tuple[str, ...]:
    """The command line of an `umbra` sub-command under this very Python."""
    return (sys.executable, "-m", "umbra", *arguments)
