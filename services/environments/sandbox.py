"""Sandboxes for code that a model wrote: a container per sample, or a class of the user's.

A container has no network, no file of the host, no environment variable of the run, a file system
in memory that ends with it, and limits of memory, CPU and processes of its own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from umbra.proto.errors import UsageError

WORK = "/sandbox"  # where commands run
USER = 65534  # nobody
OUTPUT_BYTES = 32 << 10  # of a command that are kept; the rest is read and dropped
LIFETIME_S = 4 * 3600.0  # of a container whose sample nobody ends, since its process was killed
_START_S = 300.0  # for the image to come
_END_S = 30.0
_PIECE = 1 << 16
# What Docker's command line needs of our environment; the container gets none of it.
_PASSED = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "XDG_RUNTIME_DIR")


class CommandOutcome(NamedTuple):
    """The exit code of a command, and what it wrote to stdout and stderr."""

    code: int
    output: str


class SandboxError(Exception):
    """A command has no outcome: it took too long, or the sandbox broke."""


class Sandbox(Protocol):
    """A place for the code of one sample."""

    async def run(self, command: Sequence[str], stdin: str = "") -> CommandOutcome:
        """Run `command`, with `stdin` as its input; its files are there for the next command.

        If it took too long (SandboxError), processes and files of the sample are gone.
        """
        ...

    async def close(self) -> None:
        """End running processes and remove the sample's files."""
        ...


class ContainerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`environment.sandbox_options` of a container."""

    image: str = "python:3.12-slim"  # with the tools that commands need (`sh`, `python3`)
    # MiB of all processes together, without swap, and of files, which are in memory: a quarter may
    # be in the working directory, another one in /tmp.
    memory_mb: Annotated[int, Meta(ge=8)] = 512
    command_s: Annotated[float, Meta(gt=0)] = 30.0  # seconds of one command
    arguments: list[str] = []  # more of `docker run`; `--cpus` and `--pids-limit` replace ours

    def run_arguments(self, name: str) -> list[str]:
        """Return the arguments that make a container called `name`, which waits for commands."""
        memory = f"{self.memory_mb}m"
        # Docker may set the mode of the directory below it, so that only its owner can write.
        files = f"rw,size={self.memory_mb // 4}m,mode=1777,uid={USER},gid={USER}"
        return [
            "run", "--detach", "--rm", "--init", "--name", name, "--label", "umbra.sandbox=1",
            "--network", "none", "--memory", memory, "--memory-swap", memory,
            "--cpus", "1", "--pids-limit", "128", "--read-only",
            "--tmpfs", f"{WORK}:exec,{files}", "--tmpfs", f"/tmp:{files}",
            "--workdir", WORK, "--user", f"{USER}:{USER}",
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
            "--env", f"HOME={WORK}", *self.arguments,
            "--entrypoint", "sleep", self.image, f"{LIFETIME_S:.0f}",
        ]  # fmt: skip


class Container:
    """A container of Docker, started by the first command."""

    def __init__(self, limits: ContainerLimits) -> None:
        self._limits = limits
        self._name = ""

    async def run(self, command: Sequence[str], stdin: str = "") -> CommandOutcome:
        if not self._name:
            await self._start()
        inside = ["exec", "--interactive", self._name, *command]
        try:
            code, output = await self._call(inside, stdin.encode(), self._limits.command_s)
        except SandboxError as error:
            await self.close()
            raise SandboxError(f"{error}; the sandbox restarts without its files") from None
        killed = "\n(killed: it may have needed more memory than there is)"
        return CommandOutcome(code, output + (killed if code == 137 else ""))

    async def close(self) -> None:
        name, self._name = self._name, ""
        if name:
            with suppress(SandboxError):
                await self._call(["rm", "--force", "--volumes", name], b"", _END_S)

    async def _start(self) -> None:
        self._name = f"umbra-{uuid.uuid4().hex}"  # removed even if the start is broken off
        try:
            code, output = await self._call(self._limits.run_arguments(self._name), b"", _START_S)
        except SandboxError as error:
            code, output = 1, str(error)
        if code:
            await self.close()
            raise SandboxError(f"no sandbox: docker: {output.strip()[-500:]}")

    async def _call(self, arguments: Sequence[str], stdin: bytes, limit_s: float) -> CommandOutcome:
        # Docker's command line gets no key of the run's.
        environ = {name: os.environ[name] for name in _PASSED if name in os.environ}
        return await run_process(["docker", *arguments], stdin, limit_s, environ=environ)


async def run_process(
    command: Sequence[str],
    stdin: bytes,
    limit_s: float,
    *,
    environ: Mapping[str, str],
    folder: str | None = None,
) -> CommandOutcome:
    """Run `command` as a process group in `folder`; keep its output up to `OUTPUT_BYTES`.

    `environ` are all of its environment variables. The group does not outlive `command`.
    Raises SandboxError after `limit_s` seconds.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environ,
        cwd=folder,
        start_new_session=True,  # so that whatever it starts can be killed with it
    )
    try:
        async with asyncio.timeout(limit_s):
            return await _outcome(process, stdin)
    except TimeoutError:
        raise SandboxError(f"the command took longer than {limit_s:g} s") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _outcome(process: asyncio.subprocess.Process, stdin: bytes) -> CommandOutcome:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(stdin)
    process.stdin.close()  # once all of it is written
    content, dropped = bytearray(), 0
    while piece := await process.stdout.read(_PIECE):
        fits = piece[: OUTPUT_BYTES - len(content)]
        content += fits
        dropped += len(piece) - len(fits)
    code = await process.wait()
    output = content.decode(errors="replace")
    return CommandOutcome(code, output + (f"\n({dropped} more bytes)" if dropped else ""))


def container_factory(options: Mapping[str, Any]) -> Callable[[], Container]:
    """Return the factory of containers with these `environment.sandbox_options`."""
    try:
        limits = msgspec.convert(options, ContainerLimits)
    except msgspec.ValidationError as error:
        known = ", ".join(ContainerLimits.__struct_fields__)
        raise UsageError(
            f"environment.sandbox_options of docker: {error}; they are {known}"
        ) from error
    if shutil.which("docker") is None:
        raise UsageError(
            "environment.sandbox = docker: there is no such command on this machine: install it, "
            'or name a class of yours as "module:Class"'
        )
    return lambda: Container(limits)


class SandboxTools:
    """The tools `python` and `shell` of one sample, whose sandbox is made at the first call."""

    def __init__(self, make: Callable[[], Sandbox]) -> None:
        self._make = make
        self._sandbox: Sandbox | None = None

    async def python(self, code: str) -> str:
        """Run a Python program and return its output; files stay for the next call."""
        return await self._output_of(["python3", "-"], code)

    async def shell(self, command: str) -> str:
        """Run a command in a shell and return its output; files stay for the next call."""
        return await self._output_of(["sh", "-c", command], "")

    async def close(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    async def _output_of(self, command: Sequence[str], stdin: str) -> str:
        self._sandbox = self._sandbox or self._make()
        outcome = await self._sandbox.run(command, stdin)
        code = f"(exit code {outcome.code})" if outcome.code else ""
        return "\n".join(filter(None, (outcome.output.rstrip("\n"), code))) or "(no output)"


TOOLS = ("python", "shell")  # that need a sandbox
