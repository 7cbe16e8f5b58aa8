"""Starts programs of this machine as forks of a process that has imported PyTorch already.

The import takes seconds of a core, in each process again. Each fork has its own environment, files
and command line and is a child of whoever asked. Where a server can't be used (a GPU, whose driver
does not outlive a fork), or has ended, programs are executed instead.

    python -P -m umbra.services.process.fork_server FD
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, NoReturn

import msgspec

from umbra.proto.errors import StartupError
from umbra.services.process.command import HANDLED
from umbra.services.process.parent import SEARCH_VARIABLE, inherit_orphans

# What most programs of a run import, and with it PyTorch and Transformers.
MODULES = ("umbra.services.trainer.service", "umbra.services.generator.service")
GPUS = ("nvidia[0-9]*", "kfd")  # in /dev
SPAWN_S = 60.0  # for a server that has imported to fork, on any machine
ROOM = "-" * 4096  # in the server's command line, for its forks' names
UP = b"\1"
_HEAD_BYTES = 4
_MOST_FDS = 4


class ForkOrder(msgspec.Struct, frozen=True):
    """A program to start: `argv` is (python, [-P], FILE or -m and MODULE, arguments ...)."""

    argv: Sequence[str]
    environ: Mapping[str, str]
    folder: str
    session: bool


class ForkServer:
    """The client's end of a server, which imports at once; in a fork of a server, a fork of that.

    What libraries read of its `environ` while they are imported is the same in all its forks.
    """

    in_fork: ClassVar[bool] = False  # this process was forked by a server

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._end, server_end = socket.socketpair()
        self._end.settimeout(SPAWN_S)
        self._known = False
        with server_end:
            if self.in_fork:
                self._pid = _fork(lambda: serve(server_end.detach()))
                return
            server_end.set_inheritable(True)
            null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
            self._pid = os.posix_spawn(
                sys.executable,
                (sys.executable, "-P", "-m", __name__, str(server_end.fileno()), ROOM),
                {**environ, "PYTHONUNBUFFERED": "1"},
                file_actions=null,
            )

    @classmethod
    @contextmanager
    def where_useful(cls, environ: Mapping[str, str]) -> Iterator[ForkServer | None]:
        """Have a server inside, if this machine has no GPU."""
        has_gpu = any(any(Path("/dev").glob(gpu)) for gpu in GPUS)
        with nullcontext() if has_gpu else closing(cls(environ)) as server:
            yield server

    @classmethod
    def of_fork(cls, environ: Mapping[str, str]) -> ForkServer | None:
        return cls(environ) if cls.in_fork else None

    def ready(self) -> bool:
        """Return whether `spawn` returns at once: the server has imported everything, or ended."""
        return self._known or bool(select.select([self._end], [], [], 0)[0])

    def spawn(self, order: ForkOrder, fds: Sequence[int]) -> int | None:
        """Start a program with copies of `fds` as its file descriptors 0, 1, 2 and 3.

        Return the pid of this new child, None if the server has ended. After a StartupError it may
        have been started or not.
        """
        body = msgspec.msgpack.encode(order)
        head = len(body).to_bytes(_HEAD_BYTES, "big")
        # The fork's parent is the server's own fork, which ends at once: we inherit it.
        inherit_orphans(True)
        try:
            if not self._known and self._end.recv(1) != UP:
                return None
            self._known = True
            socket.send_fds(self._end, [head], list(fds))
            self._end.sendall(body)
            with suppress(TimeoutError):
                if answer := self._end.recv(_HEAD_BYTES):
                    return int.from_bytes(answer, "big") or None
        except OSError:
            return None
        finally:
            inherit_orphans(False)
        raise StartupError(
            f"{' '.join(order.argv)} was not started within {SPAWN_S:g} s: start the run again"
        )

    def close(self) -> None:
        """End the server, which may still be importing; its forks go on."""
        self._end.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def serve(fd: int) -> NoReturn:
    """Fork for each order that comes on this socket, until its other end is closed."""
    os.closerange(3, fd)
    os.closerange(fd + 1, os.sysconf("SC_OPEN_MAX"))
    ignored = {number for number in HANDLED if signal.getsignal(number) == signal.SIG_IGN}
    for number in HANDLED:
        # Ctrl-C is for those that we start.
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    end = socket.socket(fileno=fd)
    end.sendall(UP)
    while True:
        head, fds, *_ = socket.recv_fds(end, _HEAD_BYTES, _MOST_FDS)
        if not head:
            os._exit(0)
        body = end.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        pid = _start(msgspec.msgpack.decode(body, type=ForkOrder), fds, ignored)
        for received in fds:
            os.close(received)
        end.sendall(pid.to_bytes(_HEAD_BYTES, "big"))


def _start(order: ForkOrder, fds: Sequence[int], ignored: set[signal.Signals]) -> int:
    """Return the pid of the program, a fork of one that has ended; 0 if there can't be one."""
    read_fd, write_fd = os.pipe()

    def run(middle: int) -> None:
        while os.getppid() == middle:
            time.sleep(0.001)
        _settle(order, fds, ignored)
        os.write(write_fd, b"%d" % os.getpid())
        os.closerange(len(fds), os.sysconf("SC_OPEN_MAX"))
        _run(order.argv[1:])

    middle = _fork(lambda: _fork(partial(run, os.getpid())))
    os.close(write_fd)
    os.waitpid(middle, 0)
    with open(read_fd, "rb") as pipe:
        return int(pipe.read() or 0)


def _settle(order: ForkOrder, fds: Sequence[int], ignored: set[signal.Signals]) -> None:
    """Reset the fork's state to that of a new program; `ignored` are the parent's signals."""
    ForkServer.in_fork = True
    if order.session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    os.environ.clear()
    os.environ.update(order.environ)
    os.chdir(order.folder)
    search = filter(None, order.environ.get(SEARCH_VARIABLE, "").split(os.pathsep))
    sys.path += [folder for folder in search if folder not in sys.path]
    random.seed()
    for library in ("torch", "numpy.random"):
        if (loaded := sys.modules.get(library)) is not None:
            loaded.seed()
    _show(order.argv)


def _show(argv: Sequence[str]) -> None:
    """Write `argv` where the kernel reads the command line of this process (proc(5), stat)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"".join(word.encode() + b"\0" for word in argv)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


def _fork(work: Callable[[], object]) -> int:
    """Return the pid of a fork that does `work` and ends without a word."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: those that there are only wait
        if pid := os.fork():
            return pid
    try:
        work()
    finally:
        os._exit(0)


def _run(words: Sequence[str]) -> NoReturn:
    """Run `[-P] -m MODULE` or a file with arguments, and end as Python does."""
    sys.argv = list(words[words[0] == "-P" :])
    code: object = 0
    try:
        if sys.argv[0] == "-m":
            sys.argv.pop(0)
            # The server may have imported the module, which is run as another one.
            warnings.filterwarnings("ignore", "'umbra.* found in sys.modules", RuntimeWarning)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        traceback.print_exc()
        code = 1
    with suppress(Exception):
        threading._shutdown()  # pyright: ignore - waits for threads
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(code if isinstance(code, int) else code is not None)


if __name__ == "__main__":
    # As the module that the forks import, not as a second one beside it.
    importlib.import_module("umbra.services.process.fork_server").serve(int(sys.argv[1]))
