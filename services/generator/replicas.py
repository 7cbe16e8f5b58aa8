"""Several engines under one `umbra generator`: a process each, that share the visible GPUs.

They are processes and not threads because a decode step is mostly Python and kernel launches, which
threads of one interpreter do one after another, and because a GPU that fails takes its process with
it. Each replica is a generator of its own to the run; only starting and stopping is done together.
"""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from umbra.proto.errors import ERROR_PREFIX, UsageError
from umbra.services.config import GeneratorConfig, RunConfig
from umbra.services.config.loader import to_json
from umbra.services.process.child import ChildError, ChildProcess, child_environ, umbra_argv
from umbra.services.process.command import ServiceContext
from umbra.services.process.supervisor import Program, Supervisor
from umbra.services.process.threads import service_thread

STOP_S = 30.0  # for the replicas to drain
_LOOK_S = 0.05
_GPUS = "CUDA_VISIBLE_DEVICES"


class Replica(ChildProcess):
    """One child, whose log is passed on."""

    def __init__(self, program: Program) -> None:
        environ = {**child_environ(), **program.environ}
        super().__init__(program.argv, environ=environ, stderr=subprocess.PIPE, session=False)
        self.last_line = ""
        self._reader = service_thread(self._pass_on, f"log {program.name}")
        self._reader.start()

    def end(self) -> str:
        """Its last words, once it has ended."""
        self._reader.join(timeout=1.0)
        return self.last_line.removeprefix(ERROR_PREFIX)

    def _pass_on(self) -> None:
        assert self._popen is not None
        assert self._popen.stderr is not None
        with io.TextIOWrapper(self._popen.stderr, errors="replace") as lines:
            for line in lines:
                sys.stderr.write(line)
                self.last_line = line.strip() or self.last_line


def run_replicas(ctx: ServiceContext) -> int:
    """Run `generator.replicas` generators until they have ended, or one of them fails.

    Raises:
        UsageError: the GPUs can't be shared as configured.
        ChildError: a replica failed; the others were stopped in order.
    """
    shares = share_gpus(ctx.config.generator, os.environ)
    replicas: dict[str, Replica] = {}

    def spawn(program: Program) -> Replica:
        replicas[program.name] = Replica(program)
        return replicas[program.name]

    supervisor = Supervisor(
        spawn,
        report=ctx.log.warning,
        last_line=lambda name: replicas[name].end(),
        stop_s=STOP_S,
        finish_s=math.inf,  # one that was drained may be gone for long before the others
    )
    with tempfile.TemporaryDirectory(prefix="umbra-replicas-") as folder:
        config = Path(folder) / "config.json"
        config.write_bytes(to_json(_alone(ctx)))
        try:
            for index, share in enumerate(shares):
                name = f"{ctx.name}-{index}"
                supervisor.start(Program(name, _argv(ctx, name, config), wave=0, environ=share))
            _watch(ctx, supervisor, list(replicas))
        finally:
            supervisor.close()
            for replica in replicas.values():
                replica.end()
    if (failure := supervisor.failure or supervisor.stopped_badly) is not None:
        raise ChildError(f"replica {failure.reason}", failure.exit_code)
    return 0


def share_gpus(config: GeneratorConfig, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """For each replica, what its environment differs in: an equal share of the visible GPUs.

    Raises:
        UsageError: a single device is named, or there are fewer GPUs than replicas.
    """
    count, device = config.replicas, config.device
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(
            f"generator.replicas = {count} cannot share generator.device = {device}: use cuda, "
            f"auto or cpu, and {_GPUS} to choose among GPUs"
        )
    gpus = [] if device == "cpu" else _visible_gpus(environ)
    if not gpus and device != "cuda":
        return [{} for _ in range(count)]
    each = len(gpus) // count
    if not each:
        raise UsageError(
            f"generator.replicas = {count} is more than the {len(gpus)} GPUs that are visible here"
        )
    return [{_GPUS: ",".join(gpus[i * each : (i + 1) * each])} for i in range(count)]


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA would show to a process, by number or UUID; asked without CUDA."""
    if (chosen := environ.get(_GPUS)) is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    found = Path("/proc/driver/nvidia/gpus")
    return [str(index) for index in range(len(list(found.iterdir())) if found.is_dir() else 0)]


def _alone(ctx: ServiceContext) -> RunConfig:
    replace = msgspec.structs.replace
    return replace(ctx.config, generator=replace(ctx.config.generator, replicas=1))


def _argv(ctx: ServiceContext, name: str, config: Path) -> tuple[str, ...]:
    folder = ("--run-dir", str(ctx.run_dir)) if ctx.run_dir is not None else ()
    return umbra_argv("generator", "--config", str(config), "--name", name, *folder)


def _watch(ctx: ServiceContext, supervisor: Supervisor, names: Sequence[str]) -> None:
    """Until all have ended; they are drained when this service is, or when one of them fails."""
    ready = False
    while supervisor.poll():
        if ctx.stopping.is_set():
            supervisor.drain()
        if not ready and all(supervisor.ready(name) for name in names):
            ready = True
            ctx.ready({"role": "generator", "name": ctx.name, "replicas": len(names)})
        time.sleep(_LOOK_S)
