"""The parent's side of a child process: start, watch, end; `parent.py` is the child's side."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from umbra.proto.deadline import Deadline
from umbra.proto.errors import PeerLostError, UmbraError, UsageError
from umbra.services.config.loader import ENV_PREFIX
from umbra.services.process.fork_server import ForkOrder, ForkServer
from umbra.services.process.parent import (
    PARENT_PID_VARIABLE,
    READY_FD_VARIABLE,
    SEARCH_VARIABLE,
    bypass_proxy,
)

Output: TypeAlias = Path | int | None  # a file to append to, a file descriptor, or as ours
TUNABLES = "GLIBC_TUNABLES"
_PAST_THE_CACHE = "glibc.cpu.x86_non_temporal_threshold"
_LARGE_COPY_BYTES = 1 << 20
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of a process: wall-clock and CPU seconds (user + system, with its children)."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


class ChildError(UmbraError):
    """A child ended badly; it ends us with the same exit code."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


def child_error(reason: str, exit_code: int) -> UmbraError:
    """Return the error of a child that ended with `exit_code`: a mistake of the user's is one."""
    mistake = exit_code == UsageError.exit_code
    return UsageError(reason) if mistake else ChildError(reason, exit_code)


class ChildProcess:
    """A running child.

    The kernel's parent-death signal follows the thread that forked: a child that asks for it
    (`parent.py`) has to be made in a thread that outlives it, such as the main thread.

    One with a `channel`, its end of a socket pair (`pipe.py`), has that as its stdin and says there
    that it is up; its stdout is our stderr, because libraries print there.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,  # else `child_environ()`
        stdout: Output = None,
        stderr: Output = None,
        channel: socket.socket | None = None,
        session: bool = True,  # its own: Ctrl-C does not reach it, all that it started ends with it
        server: ForkServer | None = None,  # forks it, if it can and there is no channel
    ) -> None:
        self.returncode: int | None = None
        self.usage = Usage()
        self._leads = session
        self._popen: subprocess.Popen[bytes] | None = None
        self._started = time.monotonic()
        self._ready_fd, self._ready_line = -1, b""
        variables = {
            **(child_environ() if environ is None else environ),
            PARENT_PID_VARIABLE: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        variables.pop(READY_FD_VARIABLE, None)
        with ExitStack() as files:

            def descriptor(output: Output, own: int) -> int:
                if isinstance(output, Path):
                    return files.enter_context(output.open("ab")).fileno()
                return own if output is None else output

            null = files.enter_context(open(os.devnull, "rb")).fileno()
            passed: tuple[int, ...] = ()
            fds = [null, descriptor(2 if channel else stdout, 1), descriptor(stderr, 2)]
            try:
                if channel is None:
                    self._ready_fd, child_end = os.pipe()
                    os.set_blocking(self._ready_fd, False)
                    files.callback(os.close, child_end)
                    if server is not None:
                        settings = {**variables, READY_FD_VARIABLE: str(len(fds))}
                        order = ForkOrder(argv, settings, str(Path.cwd()), session)
                        if (pid := server.spawn(order, [*fds, child_end])) is not None:
                            self.pid = pid
                            return
                    passed, variables[READY_FD_VARIABLE] = (child_end,), str(child_end)
                self._popen = subprocess.Popen(
                    argv,
                    stdin=channel.fileno() if channel else null,
                    stdout=fds[1],
                    stderr=fds[2],
                    env=variables,
                    pass_fds=passed,
                    start_new_session=session,
                )
            except BaseException:
                self._close()
                raise
        self.pid = self._popen.pid

    def ready(self) -> dict[str, Any] | None:
        if not self._ready_line.endswith(b"\n") and self._ready_fd >= 0:
            try:
                self._ready_line += os.read(self._ready_fd, 65536)
            except BlockingIOError:
                return None
        return json.loads(self._ready_line) if self._ready_line.endswith(b"\n") else None

    def poll(self) -> int | None:
        """Return the exit code (negative: the signal that ended it), or None while it runs.

        Other processes of its session end with it.
        """
        if self.returncode is None:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if os.waitid(os.P_PID, self.pid, options) is None:
                return None
            if self._leads:
                # Before it is reaped: until then its process group id cannot be given to others.
                self._signal_all(signal.SIGKILL)
            _, status, rusage = os.wait4(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            if self._popen:
                self._popen.returncode = self.returncode  # else it would wait for it as well
            wall_s = time.monotonic() - self._started
            self.usage = Usage(wall_s, rusage.ru_utime + rusage.ru_stime)
            self._close()
        return self.returncode

    def wait(self, timeout_s: float) -> int | None:
        deadline = Deadline(timeout_s)
        while (code := self.poll()) is None and not deadline.passed:
            time.sleep(_LOOK_S)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):  # none is left, or only exiting ones
            (os.killpg if self._leads else os.kill)(self.pid, number)

    def _close(self) -> None:
        if self._ready_fd >= 0:
            self.ready()
            os.close(self._ready_fd)
            self._ready_fd = -1


def start_worker(
    argv: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[ChildProcess, socket.socket]:
    """Start a child in our session, joined by a pair of sockets; return our end (`pipe.py`) too."""
    own_end, child_end = socket.socketpair()
    with ExitStack() as ends:
        ends.callback(own_end.close)
        with child_end:
            child = ChildProcess(argv, environ=environ, channel=child_end, session=False)
        ends.pop_all()
        return child, own_end


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    known = -code in list(signal.Signals)
    return f"killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def own_exit_code(code: int) -> int:
    if code == 1:
        return UmbraError.exit_code  # 1 is Python's own, after a traceback
    return code if code > 0 else PeerLostError.exit_code


def child_environ(search: Sequence[Path] = ()) -> dict[str, str]:
    """Return the environment of our children.

    `UMBRA_SECTION__KEY` variables are left out: the resolved configuration has them, and they would
    outrank what a flag said; so is UMBRA_BROKER, of a run that is watched. Modules in `search` are
    found after all libraries, none of which they replace. Loopback needs no proxy.
    """
    environ = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(ENV_PREFIX) and "__" in name) and name != "UMBRA_BROKER"
    }
    bypass_proxy(environ, "127.0.0.1", "localhost", "::1")
    if search:
        environ[SEARCH_VARIABLE] = os.pathsep.join(map(str, search))
    return with_fast_copies(environ)


def with_fast_copies(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with a setting by which copies of 1 MiB and more bypass the cache.

    Otherwise weights are copied at half the speed: glibc does so beyond a part of the largest
    cache, which on virtual machines is the whole host's. A user's own setting stays.
    """
    tunables = environ.get(TUNABLES, "")
    if _PAST_THE_CACHE in tunables:
        return dict(environ)
    setting = f"{_PAST_THE_CACHE}={_LARGE_COPY_BYTES:#x}"
    return {**environ, TUNABLES: f"{tunables}:{setting}" if tunables else setting}


def python_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """Return a module's command line under this very Python; no file in the folder shadows it."""
    return (sys.executable, "-P", "-m", module, *arguments)


def umbra_argv(*arguments: str) -> tuple[str, ...]:
    return python_argv("umbra", *arguments)
