"""`umbra trainer` with `trainer.ranks` = R starts R - 1 copies of itself and becomes their rank 0.

Whoever supervises sees one process, which ends when any of them does. torchrun and accelerate
launch do the same job over several machines; under them nothing is started here.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from umbra.proto.errors import PeerLostError, UsageError
from umbra.services.runtime.config.loader import to_json
from umbra.services.runtime.process.child import ChildProcess, child_environ, umbra_argv
from umbra.services.runtime.process.command import ServiceContext
from umbra.services.runtime.process.supervisor import Program, Supervisor

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
    supervisor = Supervisor(
        lambda program: ChildProcess(
            program.argv, environ={**child_environ(), **program.environ}, session=False
        ),
        report=context.log.warning,
    )
    os.environ.update(place, RANK="0", LOCAL_RANK="0")
    try:
        for rank in range(1, world):
            supervisor.start(_program(context, str(resolved), rank))
        yield listener
    except PeerLostError as error:
        raise PeerLostError(f"{_culprit(supervisor)}{error}") from error
    else:
        supervisor.wait(LEAVE_S)
    finally:
        supervisor.close()
        listener.close()
        resolved.unlink(missing_ok=True)


def _program(context: ServiceContext, config: str, rank: int) -> Program:
    # The resolved file holds what the variables said, and what flags said after them.
    name = f"{context.name}-rank{rank}"
    argv = umbra_argv("trainer", "--config", config, "--name", name)
    return Program(
        f"trainer rank {rank}",
        (*argv, "--run-dir", str(context.run_dir)),
        wave=0,
        environ={"RANK": str(rank), "LOCAL_RANK": str(rank)},
    )


def _culprit(supervisor: Supervisor) -> str:
    """Which rank ended, if one did."""
    deadline = time.monotonic() + NOTICE_S
    while supervisor.poll() and supervisor.failure is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if supervisor.failure is not None:
        return f"{supervisor.failure.reason}; "
    gone = [name for name, state in supervisor.states().items() if state == "done"]
    return f"{gone[0]} ended before rank 0; " if gone else ""
