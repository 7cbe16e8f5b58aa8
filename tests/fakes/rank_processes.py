"""Ranks of a trainer as processes, with the variables that torchrun sets.

They are forked from a process that has imported what they need, which takes longer than what most
of them do: it is started once, and has run nothing, so that each begins as if it were new.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from fakes.slowness import limit, reserved_port

from umbra.proto.errors import UmbraError

WAIT_S = limit(100.0)
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
}
multiprocessing.set_forkserver_preload(
    [
        "fakes.architectures",
        "fakes.closeness",
        "fakes.rank_bench",
        "torch.distributed.fsdp",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
    ]
)


@dataclass
class RankProcess:
    """One rank; `errors` is what it wrote to standard error."""

    process: BaseProcess
    pipe: Connection
    errors: Path

    def wait(self, timeout_s: float = WAIT_S) -> tuple[int, str]:
        """Wait for its end; its exit code, and what it wrote to standard error."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, "it did not end"
        return self.process.exitcode, self.errors.read_text()

    def result(self) -> Any:
        """Wait for its end; what its function returned."""
        found = None
        if self.pipe.poll(WAIT_S):
            with suppress(EOFError):
                found = self.pipe.recv()
                self.pipe.send(None)  # its tensors are read from its memory
        code, errors = self.wait()
        assert code == 0, errors
        return found


@contextmanager
def started(
    folder: Path,
    world: int,
    function: Callable[..., Any],
    *args: Any,
    hosts: int = 1,
    method: Literal["forkserver", "spawn"] = "forkserver",
) -> Iterator[list[RankProcess]]:
    """Run `function` with `args` on each rank, as if on so many hosts; all end with the block.

    With the method `spawn` each is a new process, and has imported nothing.
    """
    context: Any = multiprocessing.get_context(method)
    with reserved_port() as port:
        variables = {
            **os.environ,
            **_VARIABLES,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port.getsockname()[1]),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world // hosts),
        }
        if method == "forkserver":
            _ensure_server()
        ranks: list[RankProcess] = []
        for rank in range(world):
            own = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank % (world // hosts))}
            pipe, other = context.Pipe()
            errors = folder / f"errors.{rank}"
            process = context.Process(target=_run, args=(function, args, own, errors, other))
            ranks.append(RankProcess(process, pipe, errors))
            with other:
                process.start()
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.join()


def on_ranks(
    folder: Path, world: int, function: Callable[..., Any], *args: Any, **how: Any
) -> list[Any]:
    """Return the results of `function` on each rank; see `started`."""
    with started(folder, world, function, *args, **how) as ranks:
        return [rank.result() for rank in ranks]


def _ensure_server() -> None:
    """Start the process that ranks are forked from, whose libraries read these variables."""
    before = dict(os.environ)
    os.environ.update(_VARIABLES)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environ: Mapping[str, str],
    errors: Path,
    pipe: Connection,
) -> None:
    """Be one rank, with these variables."""
    os.environ.clear()
    os.environ.update(environ)
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        pipe.send(function(*args))
    except UmbraError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    pipe.recv()
