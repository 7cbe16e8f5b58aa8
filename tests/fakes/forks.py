"""`subprocess.Popen`, of programs of this Python: forks of a process that has imported PyTorch."""

from __future__ import annotations

import functools
import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbra.services.process.child import child_environ
from umbra.services.process.fork_server import ForkOrder, ForkServer
from umbra.services.process.parent import READY_FD_VARIABLE

SEARCH = os.pathsep.join(sys.path)
"""PYTHONPATH of a program that is to find our modules."""


@functools.cache
def server() -> ForkServer:
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
        if how["shell"] or how["preexec_fn"] or len(passed) > 1:
            return execute(*given, **named)
        if not can_be_forked(argv, environ):
            return execute(*given, **named)
        pipes = [how[one] for one in ("p2cread", "c2pwrite", "errwrite")]
        fds = [own if fd == -1 else fd for own, fd in enumerate(pipes)] + passed
        if passed:  # to say that it is ready: it becomes descriptor 3
            environ = {**environ, READY_FD_VARIABLE: "3"}
        order = ForkOrder(argv, environ, str(how["cwd"] or Path.cwd()), how["start_new_session"])
        pid = server().spawn(order, fds)
        if pid is None:
            return execute(*given, **named)
        self.pid, self._child_created = pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        getattr(self, "_close_pipe_fds")(*(how[end] for end in ends))  # noqa: B009
        return None
