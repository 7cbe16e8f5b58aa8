"""`umbra trainer`: it starts the other ranks of its host and becomes the first of them.

A supervisor sees one process per host, which ends when any of its ranks does. Under torchrun and
accelerate launch nothing is started here.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from umbra.proto.errors import PeerLostError, UsageError
from umbra.services.config import TrainerConfig
from umbra.services.config.loader import to_json
from umbra.services.http import listen
from umbra.services.modeling.run_file import load_service
from umbra.services.process.child import ChildProcess, child_environ, umbra_argv
from umbra.services.process.command import ServiceContext, service_command
from umbra.services.process.fork_server import ForkServer
from umbra.services.process.supervisor import Program, Supervisor

LEAVE_S = 15.0  # for the others to end after the first has
NOTICE_S = 3.0  # until a rank that broke the connection can be seen to have ended


@contextmanager
def launch(context: ServiceContext) -> Iterator[socket.socket | None]:
    """Run the other ranks of this host until the block ends; yield where rank 0 awaits all ranks.

    None on other hosts than rank 0's. Nothing is started with a single rank, or where a launcher
    has started this process. A PeerLostError from the block gets the rank that is the cause.
    """
    config = context.config.trainer
    if config.ranks == 1 or "WORLD_SIZE" in os.environ:
        yield None
        return
    assert context.run_dir is not None
    node = _node(config, context.options.get("node_rank"))
    local_ranks = config.ranks // config.nodes
    first, listener = node * local_ranks, None
    address = config.rendezvous if config.nodes > 1 else "127.0.0.1:0"
    host, _, port = address.rpartition(":")
    if node == 0:
        # It listens before anyone could connect, and no other process can take the port meanwhile.
        listener = listen(address, "trainer.rendezvous")
        port = listener.getsockname()[1]
    place = {
        "MASTER_ADDR": host.removeprefix("[").removesuffix("]"),
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(config.ranks),
        "LOCAL_WORLD_SIZE": str(local_ranks),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        place["OMP_NUM_THREADS"] = str(config.threads or max(1, cores // local_ranks))
    # The resolved file holds what the variables said, and what flags said after them.
    resolved = context.run_dir / f".{context.name}-ranks-{node}.json"
    resolved.write_bytes(to_json(context.config))
    server = ForkServer.of_fork(child_environ())

    def start(program: Program) -> ChildProcess:
        environ = {**child_environ(), **program.environ}
        return ChildProcess(program.argv, environ=environ, session=False, server=server)

    supervisor = Supervisor(start, report=context.log.warning)
    os.environ.update(place, RANK=str(first), LOCAL_RANK="0")
    try:
        options = ("--config", str(resolved), "--run-dir", str(context.run_dir))
        for local in range(1, local_ranks):
            rank = first + local
            argv = umbra_argv("trainer", *options, "--name", f"{context.name}-rank{rank}")
            environ = {"RANK": str(rank), "LOCAL_RANK": str(local)}
            supervisor.start(Program(f"trainer rank {rank}", argv, wave=0, environ=environ))
        yield listener
    except PeerLostError as error:
        raise PeerLostError(f"{_culprit(supervisor, first)}{error}") from error
    else:
        supervisor.wait(LEAVE_S)
    finally:
        supervisor.close()
        if server is not None:
            server.close()
        if listener is not None:
            listener.close()
        resolved.unlink(missing_ok=True)


def _node(config: TrainerConfig, node_rank: int | None) -> int:
    """Return the number of this host; refuse settings with which hosts cannot meet."""
    nodes = config.nodes
    if nodes == 1:
        if node_rank:
            raise UsageError(
                f"--node-rank {node_rank} (UMBRA_NODE_RANK), but trainer.nodes = 1: set "
                "trainer.nodes on all hosts"
            )
        return 0
    if node_rank is None or node_rank >= nodes:
        fault = "is missing" if node_rank is None else f"{node_rank} is no host"
        raise UsageError(
            f"--node-rank {fault} (UMBRA_NODE_RANK): with trainer.nodes = {nodes} each host runs "
            f"`umbra trainer` with its number, 0 to {nodes - 1}"
        )
    _, colon, port = config.rendezvous.rpartition(":")
    if not colon or not port.isdecimal() or not int(port):
        raise UsageError(
            f"trainer.rendezvous = {config.rendezvous!r}: with trainer.nodes = {nodes} it has to "
            "be HOST:PORT, an address of node 0 that the other hosts reach and a port that is free "
            "there"
        )
    return node_rank


def _culprit(supervisor: Supervisor, first: int) -> str:
    """Say which rank of this host ended, if one did."""
    deadline = time.monotonic() + NOTICE_S
    while supervisor.poll() and supervisor.failure is None and time.monotonic() < deadline:
        time.sleep(0.05)
    failure = supervisor.failure
    if failure is not None:
        # A rank that lost another one has lost the same as this one.
        return "" if failure.code == PeerLostError.exit_code else f"{failure.reason}; "
    finished = [name for name, state in supervisor.states().items() if state == "done"]
    return f"{finished[0]} ended before rank {first}; " if finished else ""


def _run(context: ServiceContext) -> int:
    if context.run_dir is None:
        raise UsageError("--run-dir is missing: the trained model is written there")
    with launch(context) as listener:
        # Here and not above: `umbra trainer --help` need not wait for torch.
        from umbra.services.trainer.service import run

        return run(context, listener)


command = service_command(
    "trainer",
    _run,
    load=load_service,
    options=[
        click.Option(
            ["--node-rank"],
            type=click.IntRange(0),
            envvar="UMBRA_NODE_RANK",
            help="Which of trainer.nodes hosts this is: 0, where rank 0 is, to nodes - 1.",
        )
    ],
)
