"""vLLM inside, and `vllm serve` as a user starts it for `generator.engine = "vllm-http"`."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from umbra.services.config import RunConfig
from umbra.services.config.loader import load_config
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.engines.opening import open_engine

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


# The command `vllm` of the build for CPUs, which asks for its version by another name.
COMMAND = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    main()
"""


def vllm_config(directory: Path, *more: str, **generator: Any) -> RunConfig:
    """Return the settings of vLLM on a model in float32, with more of the generator's."""
    own = {"engine": "vllm", **generator}
    if own["engine"] == "vllm":
        own["engine_args.block_size"] = 32  # so that prefixes are shared in short prompts
    settings = [f"generator.{key}={value}" for key, value in own.items()]
    paths = [f"model.path={directory}", "weight_hub.dtype=float32"]
    return load_config(overrides=[*paths, *settings, *more], environ={})


@contextmanager
def opened(config: RunConfig) -> Iterator[Engine]:
    found = open_engine(config, "generator-0")
    try:
        yield found.engine
    finally:
        found.engine.close()
        del found
        gc.collect()  # here, where vLLM's warnings about its own sockets are ignored


class VllmServe:
    """One at a socket beside its `log`, or at `port` if not 0; `enter` runs it on another host."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        seed: int = 1,
        port: int = 0,
        context: int = 192,
        enter: Sequence[str] = (),
    ) -> None:
        path = log.with_suffix(".sock")
        self.url = f"http://127.0.0.1:{port}" if port else f"unix:{path}"
        where = ("--host", "127.0.0.1", "--port", str(port)) if port else ("--uds", str(path))
        self._argv = [
            *enter, "nice", "-n", "10", sys.executable, "-c", COMMAND, "serve", str(model), *where,
            "--seed", str(seed), "--dtype", "float32", "--max-model-len", str(context),
            "--max-num-seqs", "64", "--block-size", "32", "--enforce-eager",
            "--enable-scale-out", "--max-logprobs", "-1", "--logprobs-mode", "processed_logprobs",
            "--weight-transfer-config", '{"backend": "umbra"}', "--distributed-executor-backend",
            "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        ]  # fmt: skip
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(
                self._argv,
                env=os.environ | ENVIRONMENT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill it and its engine core."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        Path(self.url.removeprefix("unix:")).unlink(missing_ok=True)


@contextmanager
def serving(*servers: VllmServe) -> Iterator[None]:
    """Kill the remaining `servers` at the end."""
    try:
        yield
    finally:
        for server in servers:
            server.kill()
