"""Ranks of a trainer as processes, with the variables that torchrun sets.

They are forked from a process that has imported what they need, which takes longer than what most
of them do: it is started once, and has run nothing, so that each begins as if it were new.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import msgspec
from fakes.slowness import limit, reserved_port

from umbra.proto.errors import PeerLostError

TESTS = Path(__file__).parents[1]
WAIT_S = limit(100.0)
Method = Literal["forkserver", "spawn"]
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
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


class RankProcess:
    """One rank; its exit code, and what it wrote to standard error."""

    def __init__(
        self,
        method: Method,
        words: Sequence[str],
        environ: Mapping[str, str],
        errors: Path,
        port: socket.socket,
    ) -> None:
        self._errors = errors
        self._port = port  # kept until it has ended
        context: Any = multiprocessing.get_context(method)
        self._process: BaseProcess = context.Process(
            target=_run, args=(list(words), dict(environ), errors)
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """As `subprocess` has it: minus the number of the signal that ended it."""
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> str:
        """Wait for its end; what it wrote.

        Raises:
            TimeoutExpired: it did not end within `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        self._port.close()
        return self._errors.read_text(encoding="utf-8") if self._errors.exists() else ""

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self._process.kill()


def launch(
    folder: Path,
    world: int,
    program: Sequence[str],
    hosts: int = 1,
    method: Method = "forkserver",
) -> list[RankProcess]:
    """The ranks, as if on so many hosts, each of which runs `program` with `folder` at the end.

    With the method `spawn` each is a new process, and has imported nothing.
    """
    ports = [reserved_port()]
    ports += [ports[0].dup() for _ in range(world - 1)]
    place = {
        **os.environ,
        **_VARIABLES,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0].getsockname()[1]),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world // hosts),
    }
    if method == "forkserver":
        _ensure_server()
    return [
        RankProcess(
            method,
            [*program, str(folder)],
            {**place, "RANK": str(rank), "LOCAL_RANK": str(rank % (world // hosts))},
            folder / f"errors.{rank}",
            ports[rank],
        )
        for rank in range(world)
    ]


def start(
    directory: Path, folder: Path, world: int, cases: dict[str, Any], batches: Any, hosts: int = 1
) -> list[RankProcess]:
    """Ranks that run through `cases`, from the model in `directory`; see `trainer_rank.py`."""
    folder.mkdir(exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    (folder / "batches.msgpack").write_bytes(msgspec.msgpack.encode(batches))
    return launch(folder, world, [str(TESTS / "programs/trainer_rank.py"), str(directory)], hosts)


def see_through(ranks: Sequence[RankProcess]) -> None:
    try:
        for rank in ranks:
            errors = rank.communicate(timeout=WAIT_S)
            assert rank.returncode == 0, errors
    finally:
        end(ranks)


def see_the_loss(ranks: Sequence[RankProcess], told: str) -> None:
    """Wait until the first of two ranks ends because the other is gone, and says so."""
    try:
        errors = ranks[0].communicate(timeout=WAIT_S)
        assert ranks[0].returncode == PeerLostError.exit_code, errors
        assert "trainer rank 0 lost another rank" in errors
        assert told in errors
    finally:
        end(ranks)


def end(ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        rank.kill()
        rank.communicate()


def _ensure_server() -> None:
    """Start the process that ranks are forked from, whose libraries read these variables."""
    before = dict(os.environ)
    os.environ.update(_VARIABLES)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(words: list[str], environ: dict[str, str], errors: Path) -> None:
    """Be the program `words`, with these variables."""
    os.environ.clear()
    os.environ.update(environ)
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
