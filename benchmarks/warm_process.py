"""Processes of a run that are forked from one which has torch and the services imported already.

Importing takes longer than a short run. Everything else is as `umbra up` does it: the same
commands, each a process of its own, with its own sockets, log and end.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL
from typing import NoReturn

from umbra.deploy import stage, up
from umbra.services.process.child import ChildProcess, Output

IMPORTS = (
    "accelerate",
    "transformers.models.qwen3.modeling_qwen3",
    "umbra.services.buffer.service",
    "umbra.services.generator.evaluate",
    "umbra.services.generator.service",
    "umbra.services.trainer.service",
    "umbra.services.weight_hub.service",
)
YIELDS = 5  # niceness of the trainer above the others'


class WarmProcess(ChildProcess):
    """As `ChildProcess`, but forked, and not in a session of its own.

    Where a group of processes shares a core, the trainer yields to the generator. (Linux weighs the
    niceness of processes within a session only.)
    """

    def _spawn(
        self,
        argv: list[str],
        environ: dict[str, str],
        stdout: Output,
        stderr: Output,
        stdin: int = DEVNULL,
        ready_fd: int | None = None,  # inherited, as all of ours is
    ) -> int:
        pid = os.fork()
        if pid == 0:
            assert isinstance(stdout, Path)
            assert isinstance(stderr, Path)
            _become(argv, environ, stderr, stdout)
        _own_group(pid)
        return pid


def warm_up() -> None:
    """Import everything, and have `umbra up` fork from here on, in this process."""
    for module in IMPORTS:
        import_module(module)
    up.ChildProcess = stage.ChildProcess = WarmProcess


def _become(
    argv: list[str], environ: dict[str, str], log_path: Path, stdout_path: Path
) -> NoReturn:
    """Be the Python command `argv`, in the process just forked."""
    code = 1
    try:
        os.setpgid(0, 0)
        _redirect(os.devnull, os.O_RDONLY, 0)
        _redirect(stdout_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 1)
        _redirect(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 2)
        os.environ.clear()
        os.environ.update(environ)
        _, _, module, *arguments = argv  # PYTHON -m MODULE ...
        if arguments[:1] == ["trainer"]:
            os.nice(YIELDS)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - nothing may get back into the code that forked
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _own_group(pid: int) -> None:
    """In the parent as well, so that the group is there before anybody signals it."""
    try:
        os.setpgid(pid, pid)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended already


def _redirect(path: str | Path, flags: int, number: int) -> None:
    opened = os.open(path, flags, 0o644)
    os.dup2(opened, number)
    os.close(opened)
