"""`vllm serve`, as a user starts it for `generator.engine = "vllm-http"`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

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
        slots: int = 64,
        enter: Sequence[str] = (),
    ) -> None:
        path = log.with_suffix(".sock")
        self.url = f"http://127.0.0.1:{port}" if port else f"unix:{path}"
        where = ("--host", "127.0.0.1", "--port", str(port)) if port else ("--uds", str(path))
        self._argv = [
            *enter, "nice", "-n", "10", sys.executable, "-c", COMMAND, "serve", str(model), *where,
            "--seed", str(seed), "--dtype", "float32", "--max-model-len", str(context),
            "--max-num-seqs", str(slots), "--block-size", "32", "--enforce-eager",
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
