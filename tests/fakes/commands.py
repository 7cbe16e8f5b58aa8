"""Programs of this Python that a test runs: forks of a process that has imported PyTorch."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import limit

from umbra.services.process.child import child_environ
from umbra.services.process.fork_server import ForkOrder, ForkServer
from umbra.services.process.parent import READY_FD_VARIABLE

UMBRA = (sys.executable, "-m", "umbra")
SEARCH = os.pathsep.join(sys.path)
"""PYTHONPATH of a program that is to find our modules."""


def needs(package: str) -> None:
    """Skip the tests of a module where `package` is missing; importing it may take long."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make setup)", allow_module_level=True)


@functools.cache
def fork_server() -> ForkServer:
    """Return this worker's server, which has nothing of a run in its environment."""
    return ForkServer({**child_environ(), "PYTHONPATH": SEARCH})


def can_be_forked(argv: list[str], environ: Mapping[str, str] | None) -> bool:
    """Return whether nothing in its environment would be read while PyTorch is imported."""
    is_known = argv[0] == sys.executable and (argv[1] in ("-m", "-P") or argv[1].endswith(".py"))
    if environ is None or not is_known:
        return False
    others = {**os.environ, "PYTHONPATH": SEARCH}
    changed = {name for name, value in others.items() if environ.get(name) != value}
    changed |= {name for name in environ if name not in others}
    return all(name.startswith("UMBRA_") for name in changed)


class Popen(subprocess.Popen[Any]):
    """A program with its pipes, forked where that makes no difference to it."""

    def _execute_child(self, *given: Any, **named: Any) -> None:
        execute: Any = getattr(super(), "_execute_child")  # noqa: B009 - it is private
        how = inspect.signature(execute).bind(*given, **named).arguments
        argv = [str(word) for word in how["args"]]
        environ, passed = how["env"], list(how["pass_fds"])
        is_plain = not how["shell"] and not how["preexec_fn"] and len(passed) <= 1
        pid = None
        if is_plain and can_be_forked(argv, environ):
            pipes = [how[one] for one in ("p2cread", "c2pwrite", "errwrite")]
            fds = [own if fd == -1 else fd for own, fd in enumerate(pipes)] + passed
            if passed:  # to say that it is ready: it becomes descriptor 3
                environ = {**environ, READY_FD_VARIABLE: "3"}
            place, session = str(how["cwd"] or Path.cwd()), how["start_new_session"]
            pid = fork_server().spawn(ForkOrder(argv, environ, place, session), fds)
        if pid is None:
            return execute(*given, **named)
        self.pid, self._child_created = pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        getattr(self, "_close_pipe_fds")(*(how[end] for end in ends))  # noqa: B009
        return None


def call(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    quiet_s: float = 60.0,
    check: bool = False,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program with our modules in its path; return what it printed and its exit code."""
    with Popen(
        argv,
        env={**os.environ, "PYTHONPATH": SEARCH, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit(quiet_s))
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(argv, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
