"""A sandbox without a container, for machines that have none: a process with limits.

It keeps a mistake from costing more than its sample: time, memory, files and output are limited,
the folder is the sample's own, and no variable of the run is in its environment. It does NOT keep
code from reading the files of its user or from opening connections. The tiny model of this example
writes a dozen characters; for any other take `sandbox = "docker"`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

from umbra.services.environments.sandbox import CommandOutcome, SandboxError, run_process

LIMITS = 'ulimit -t {cpu_s} && ulimit -v {kib} && ulimit -f 2048 && exec "$@"'


class LocalProcess:
    """Commands run in a temporary folder, one process group each.

    Args:
        command_s: seconds of one command.
        memory_mb: MiB of address space of each of its processes.
    """

    def __init__(self, command_s: float = 30.0, memory_mb: int = 256) -> None:
        self._command_s = command_s
        self._limits = LIMITS.format(cpu_s=1, kib=memory_mb << 10)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def run(self, command: Sequence[str], stdin: str = "") -> CommandOutcome:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="umbra-sandbox-")
        path = os.pathsep.join([os.path.dirname(sys.executable), os.defpath])
        try:
            return await run_process(
                ["sh", "-c", self._limits, "sh", *command],
                stdin.encode(),
                self._command_s,
                environ={"PATH": path, "HOME": self._folder.name},
                folder=self._folder.name,
            )
        except SandboxError:
            await self.close()
            raise

    async def close(self) -> None:
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()
