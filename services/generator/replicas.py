"""Several engines under one `umbra generator`: a process each, that share the visible GPUs.

They are processes and not threads because a decode step is mostly Python and kernel launches, which
threads of one interpreter do one after another, and because a GPU that fails takes its process with
it. Each replica is a generator of its own to the run; only starting and stopping is done together.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from umbra.proto.errors import PeerLostError, UmbraError, UsageError
from umbra.services.runtime.config import GeneratorConfig, RunConfig
from umbra.services.runtime.config.loader import ENV_PREFIX, to_json
from umbra.services.runtime.process.command import READY_FD_VARIABLE, ServiceContext
from umbra.services.runtime.process.parent import PARENT_PID_VARIABLE
from umbra.services.runtime.process.threads import service_thread

STOP_S = 30.0  # for the replicas to drain
_LOOK_S = 0.05
_GPUS = "CUDA_VISIBLE_DEVICES"
_ERROR = "umbra: error: "


class ReplicaError(UmbraError):
    """A replica ended; its group ends with the same exit code."""

    def __init__(self, reason: str, exit_code: int) -> None:
        super().__init__(reason)
        self.exit_code = exit_code


class Replica:
    """One child, and what it says."""

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name = name
        self.last_line = ""
        self._ready_fd, child_end = os.pipe()
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**environ, READY_FD_VARIABLE: str(child_end)},
                pass_fds=(child_end,),
                text=True,
                errors="replace",
            )
        finally:
            os.close(child_end)
        os.set_blocking(self._ready_fd, False)
        self._reader = service_thread(self._pass_on, f"log {name}")
        self._reader.start()

    def ready(self) -> bool:
        """Whether it has said, since the last call, that it serves."""
        try:
            return bool(os.read(self._ready_fd, 65536))
        except BlockingIOError:
            return False

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        self._popen.send_signal(number)

    def close(self) -> None:
        """End it if it runs, and let go of it."""
        self._popen.kill()
        self._popen.wait()
        self._reader.join()
        os.close(self._ready_fd)

    def end(self) -> str:
        """Its last words, once it has ended."""
        self._reader.join(timeout=1.0)
        return self.last_line.removeprefix(_ERROR)

    def _pass_on(self) -> None:
        assert self._popen.stderr is not None
        with self._popen.stderr as lines:
            for line in lines:
                sys.stderr.write(line)
                self.last_line = line.strip() or self.last_line


def run_replicas(ctx: ServiceContext) -> int:
    """Run `generator.replicas` generators until they have ended, or one of them fails.

    Raises:
        UsageError: the GPUs can't be shared as configured.
        ReplicaError: a replica failed; the others were stopped in order.
    """
    environments = share_gpus(ctx.config.generator, os.environ)
    with tempfile.TemporaryDirectory(prefix="umbra-replicas-") as folder:
        config = Path(folder) / "config.json"
        config.write_bytes(to_json(_alone(ctx)))
        replicas: list[Replica] = []
        try:
            for index, environ in enumerate(environments):
                name = f"{ctx.name}-{index}"
                replicas.append(Replica(name, _argv(ctx, name, config), _environ(environ)))
            return _watch(ctx, replicas)
        finally:
            for replica in replicas:
                replica.close()


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


def _argv(ctx: ServiceContext, name: str, config: Path) -> list[str]:
    argv = [sys.executable, "-m", "umbra", "generator", "--config", str(config), "--name", name]
    return [*argv, "--run-dir", str(ctx.run_dir)] if ctx.run_dir is not None else argv


def _environ(changes: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what the written configuration holds already."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith(ENV_PREFIX) and "__" in name)
    }
    return {**kept, **changes, PARENT_PID_VARIABLE: str(os.getpid())}


def _watch(ctx: ServiceContext, replicas: Sequence[Replica]) -> int:
    waiting = list(replicas)
    while not ctx.stopping.wait(_LOOK_S):
        if waiting:
            waiting = [replica for replica in waiting if not replica.ready()]
            if not waiting:
                ctx.ready({"role": "generator", "name": ctx.name, "replicas": len(replicas)})
        codes = [replica.poll() for replica in replicas]
        for replica, code in zip(replicas, codes, strict=True):
            if code:
                said = replica.end()
                ctx.log.error("%s ended: stopping the other replicas", replica.name)
                _stop(replicas)
                raise _failure(replica.name, code, said)
        if all(code == 0 for code in codes):
            return 0
    _stop(replicas)
    failed = next((replica for replica in replicas if replica.poll()), None)
    if failed is not None:
        raise _failure(failed.name, failed.poll() or 0, failed.end())
    return 0


def _stop(replicas: Sequence[Replica]) -> None:
    """Have all of them drain; those that don't are killed when they are closed."""
    for replica in replicas:
        replica.signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline and any(replica.poll() is None for replica in replicas):
        time.sleep(_LOOK_S)


def _failure(name: str, code: int, said: str) -> ReplicaError:
    how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
    own = PeerLostError.exit_code if code < 0 else UmbraError.exit_code if code == 1 else code
    return ReplicaError(f"replica {name} ended ({how}){': ' + said if said else ''}", own)
