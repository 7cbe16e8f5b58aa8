"""Steps around a run (trying the environment, warm start, eval): children that run to their end."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from umbra.deploy.run_folder import CHECK, RunFolder, tail
from umbra.proto.errors import ERROR_PREFIX, UmbraError
from umbra.services.buffer.prompts import rows_by_environment
from umbra.services.config import RunConfig
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.config.loader import to_json
from umbra.services.generator.checks import RowsToTry, row_bytes
from umbra.services.process import child
from umbra.services.process.child import ChildError, ChildProcess, child_environ
from umbra.services.process.command import SignalCounter
from umbra.services.process.files import DISK, READABLE_MODE
from umbra.services.process.fork_server import ForkServer
from umbra.services.prompts import read_source

POLL_S = 0.02
FORESEEN_CODES = (2, 3, 4, 7, 8)  # ends that a sentence for people explains


class StageInterrupted(Exception):  # noqa: N818 - it is no error
    """The user asked to stop."""


@dataclass(frozen=True)
class Stages:
    """Steps around a run: children that log to `logs/<name>.log` in its folder.

    A `server` forks them, if it is given. ChildError has the last line of a child's log;
    StageInterrupted (KeyboardInterrupt without `interrupts`) means that the child is dead.
    """

    folder: RunFolder
    environ: Mapping[str, str] = field(default_factory=child_environ)
    interrupts: SignalCounter | None = None
    server: ForkServer | None = None

    def run(self, name: str, *words: str, module: str = "umbra") -> str:
        """Run `umbra <words>`, or another `module`, to its end; return its output."""

        def turn() -> None:
            if self.interrupts is None:
                time.sleep(POLL_S)
            elif self.interrupts.count:
                raise StageInterrupted
            else:
                self.interrupts.wait(POLL_S)

        while self.server is not None and not self.server.ready():
            turn()
        process = self.begin(name, *words, module=module)
        try:
            while not self.has_ended(name, process):
                turn()
        finally:
            process.kill()
            process.wait(math.inf)
        return self._output(name).read_text(encoding="utf-8", errors="replace")

    def begin(self, name: str, *words: str, module: str = "umbra") -> ChildProcess:
        """Start a stage as `run` does; a `server` has to be ready."""
        argv, log = child.python_argv(module, *words), self.folder.log(name)
        out, server = self._output(name), self.server
        return ChildProcess(argv, environ=self.environ, stdout=out, stderr=log, server=server)

    def _output(self, name: str) -> Path:
        return self.folder.logs / f"{name}.out"

    def has_ended(self, name: str, process: ChildProcess) -> bool:
        """Return whether a stage has ended well; ChildError if it has ended otherwise."""
        if not (code := process.poll()):
            return code == 0
        reason = self.last_line(name)
        if reason and code in FORESEEN_CODES:
            raise child.child_error(reason, code)
        failure = f"{name} failed ({child.describe_exit(code)})" + (f": {reason}" if reason else "")
        raise child.child_error(failure, child.own_exit_code(code))

    def last_line(self, name: str) -> str:
        """Return the last line of a log, of an error without its beginning."""
        return next(iter(tail(self.folder.log(name))[-1:]), "").removeprefix(ERROR_PREFIX)

    def try_environment(
        self, config: RunConfig, *, model: bool = True, stand_in: str = ""
    ) -> list[str]:
        """Write `config` to the folder; try its environment on the first prompt, then its model.

        Returns warnings of `check_model`, which brings torch and is left out without `model`. The
        directory `stand_in` is tried for a model that is not there yet.
        """
        DISK.replace(self.folder.config, to_json(config), mode=READABLE_MODE)
        rows = self.folder.logs / f"{CHECK}.rows"
        rows.write_bytes(msgspec.json.encode(find_rows(config)))
        words = (str(self.folder.config), str(rows), *(["model", stand_in] if model else []))
        program = "umbra.services.generator.checks"
        return self.run(CHECK, *words, module=program).splitlines()


def last_object(text: str) -> dict[str, Any]:
    """Return the JSON object on the last line of a stage's output; UmbraError without one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise UmbraError(f"expected one line of JSON, got {text[-200:]!r}")


def find_rows(config: RunConfig) -> RowsToTry:
    """Return the first row of each environment, and rows that may be longer than the context.

    Rows of eval.prompts are included.
    """
    own = rows_by_environment(config.data, config.environments, f"{config.data.prompts}, row ")
    prompts = {("data.prompts", name): rows for name, rows in own.items()}
    if heldout := config.eval.prompts:
        where, columns = "eval.prompts, row ", config.eval.columns
        for prompt in read_source(heldout, where, columns, section="eval"):
            name = str(prompt.row.get(ENVIRONMENT)) if config.environments else ""
            prompts.setdefault(("eval.prompts", name), []).append(prompt)
    first = [(key, name, rows[0].row) for (key, name), rows in prompts.items()]
    half = config.generator.max_context // 2  # a template adds the rest
    long = (p for rows in prompts.values() for p in rows if row_bytes(p.row) >= half)
    return RowsToTry(first, {prompt.prompt_id: prompt.row for prompt in long})


def try_aside(config: RunConfig, search: Sequence[Path], *, model: bool = False) -> list[str]:
    """Call `Stages.try_environment` for a folder that is removed at once."""
    with tempfile.TemporaryDirectory(prefix="umbra-check-") as scratch, SignalCounter() as signals:
        folder = RunFolder(Path(scratch))
        folder.logs.mkdir()
        try:
            stages = Stages(folder, child_environ(search), signals)
            return stages.try_environment(config, model=model)
        except StageInterrupted as error:
            raise ChildError("interrupted", signals.exit_code) from error
