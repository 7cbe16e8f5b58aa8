"""`umbra trainer` with `trainer.ranks` = R starts R - 1 copies of itself and becomes their rank 0.

Whoever supervises sees one process, which ends when any of them does. torchrun and accelerate
launch do the same job over several machines; under them nothing is started here.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from umbra.proto.errors import PeerLostError, UsageError
from umbra.services.runtime.config.loader import ENV_PREFIX, to_json
from umbra.services.runtime.process.command import READY_FD_VARIABLE, ServiceContext
from umbra.services.runtime.process.parent import PARENT_PID_VARIABLE

LEAVE_S = 15.0  # for the others to end after rank 0 has
NOTICE_S = 3.0  # until a rank that broke the connection can be seen to have ended


@contextmanager
def launch(context: ServiceContext) -> Iterator[socket.socket | None]:
    """The other ranks as processes of this machine, until the block ends; where they are awaited.

    None, and nothing is started, with a single rank or where a launcher has started this process.

    Raises:
        UsageError: no run directory.
        PeerLostError: from the block, with the rank that is the cause.
    """
    world = context.config.trainer.ranks
    if world == 1 or "WORLD_SIZE" in os.environ:
        yield None
        return
    if context.run_dir is None:
        raise UsageError("--run-dir is missing: the trained model is written there")
    # It listens before anyone could connect, and no other process can take the port meanwhile.
    listener = socket.create_server(("127.0.0.1", 0), backlog=world)
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        place["OMP_NUM_THREADS"] = str(context.config.trainer.threads or max(1, cores // world))
    resolved = context.run_dir / f".{context.name}-ranks.json"
    resolved.write_bytes(to_json(context.config))
    ranks = [_start(context, str(resolved), rank, place) for rank in range(1, world)]
    os.environ.update(place, RANK="0", LOCAL_RANK="0")
    try:
        yield listener
    except PeerLostError as error:
        raise PeerLostError(f"{_culprit(ranks)}{error}") from error
    else:
        _wait(ranks, LEAVE_S)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        listener.close()
        resolved.unlink(missing_ok=True)


def _start(
    context: ServiceContext, config: str, rank: int, place: dict[str, str]
) -> subprocess.Popen[bytes]:
    # The resolved file holds what the variables said, and what flags said after them.
    environ = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(ENV_PREFIX) and "__" in name) and name != READY_FD_VARIABLE
    }
    environ |= place | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        PARENT_PID_VARIABLE: str(os.getpid()),
    }
    argv = [sys.executable, "-m", "umbra", "trainer", "--config", config]
    argv += ["--name", f"{context.name}-rank{rank}", "--run-dir", str(context.run_dir)]
    return subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL)


def _wait(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in ranks:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _culprit(ranks: list[subprocess.Popen[bytes]]) -> str:
    """Which rank ended, if one did."""
    deadline = time.monotonic() + NOTICE_S
    while time.monotonic() < deadline:
        for number, process in enumerate(ranks, start=1):
            if (code := process.poll()) is not None:
                how = (
                    f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                )
                return f"trainer rank {number} {how}; "
        time.sleep(0.05)
    return ""
