"""Steps around a run (trying the environment, warm start, eval): children that run to their end."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from umbra.deploy.run_folder import CHECK, RunFolder, tail
from umbra.proto.errors import ERROR_PREFIX, UmbraError
from umbra.services.buffer.prompts import rows_to_try
from umbra.services.config import RunConfig
from umbra.services.config.generation import ENVIRONMENT
from umbra.services.config.loader import to_json
from umbra.services.generator.checks import RowsToTry, row_bytes
from umbra.services.process.child import (
    ChildError,
    ChildProcess,
    child_environ,
    child_error,
    describe_exit,
    own_exit_code,
    python_argv,
)
from umbra.services.process.command import SignalCounter
from umbra.services.process.files import DISK, READABLE_MODE
from umbra.services.process.fork_server import ForkServer
from umbra.services.prompts import read_source

POLL_S = 0.02
Waiting = Callable[[], None]  # called again and again while a stage runs
UMBRA = "umbra"
FORESEEN_CODES = (2, 3, 4, 7, 8)  # ends that a sentence for people explains


class StageInterrupted(Exception):  # noqa: N818 - it is no error
    """The user asked to stop."""


def run_stage(
    name: str,
    arguments: tuple[str, ...],
    *,
    folder: RunFolder,
    environ: Mapping[str, str],
    interrupts: SignalCounter | None = None,
    module: str = UMBRA,
    server: ForkServer | None = None,
    waiting: Waiting = lambda: None,
) -> str:
    """Run `umbra <arguments>`, logging to `logs/<name>.log`; return its output.

    `server` forks it, if it is given. ChildError has the last line of its log; StageInterrupted
    (KeyboardInterrupt without `interrupts`) means that the child is dead.
    """

    def turn() -> None:
        waiting()
        if interrupts is None:
            time.sleep(POLL_S)
        elif interrupts.count:
            raise StageInterrupted
        else:
            interrupts.wait(POLL_S)

    while server is not None and not server.ready():
        turn()
    stage = begin_stage(name, arguments, folder, environ, server, module)
    try:
        while not has_ended(stage, name, folder):
            turn()
    finally:
        stage.kill()
        stage.wait(math.inf)
    return (folder.logs / f"{name}.out").read_text(encoding="utf-8", errors="replace")


def begin_stage(
    name: str,
    arguments: Sequence[str],
    folder: RunFolder,
    environ: Mapping[str, str],
    server: ForkServer | None = None,
    module: str = UMBRA,
) -> ChildProcess:
    """Start a stage as `run_stage` does; a `server` has to be ready."""
    argv, out = python_argv(module, *arguments), folder.logs / f"{name}.out"
    return ChildProcess(argv, environ=environ, stdout=out, stderr=folder.log(name), server=server)


def has_ended(stage: ChildProcess, name: str, folder: RunFolder) -> bool:
    """Return whether a stage has ended well; ChildError has the last line that it said."""
    if not (code := stage.poll()):
        return code == 0
    reason = last_said(folder, name)
    if reason and code in FORESEEN_CODES:
        raise child_error(reason, code)
    failure = f"{name} failed ({describe_exit(code)})"
    raise child_error(f"{failure}: {reason}" if reason else failure, own_exit_code(code))


def last_object(text: str) -> dict[str, Any]:
    """Return the JSON object on the last line of a stage's output; UmbraError without one."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise UmbraError(f"expected one line of JSON, got {text[-200:]!r}")


def last_said(folder: RunFolder, name: str) -> str:
    return next(iter(tail(folder.log(name))[-1:]), "").removeprefix(ERROR_PREFIX)


def try_environment(
    config: RunConfig,
    folder: RunFolder,
    environ: Mapping[str, str],
    interrupts: SignalCounter,
    waiting: Waiting = lambda: None,
    *,
    model: bool = True,
    stand_in: str = "",
    server: ForkServer | None = None,
) -> list[str]:
    """Write `config` to `folder`, and try its environment on the first prompt, then its model.

    Returns warnings of `check_model`, which brings torch and is left out without `model`. The
    directory `stand_in` is tried for a model that is not there yet. Raises the errors of
    `run_stage`.
    """
    DISK.replace(folder.config, to_json(config), mode=READABLE_MODE)
    rows = folder.logs / f"{CHECK}.rows"
    rows.write_bytes(msgspec.json.encode(find_rows(config)))
    output = run_stage(
        CHECK,
        (str(folder.config), str(rows), *(["model", stand_in] if model else [])),
        folder=folder,
        environ=environ,
        interrupts=interrupts,
        module="umbra.services.generator.checks",
        waiting=waiting,
        server=server,
    )
    return output.splitlines()


def find_rows(config: RunConfig) -> RowsToTry:
    """Return the first row of each environment, and rows that may be longer than the context.

    Rows of eval.prompts are included.
    """
    prompts = {
        ("data.prompts", name): rows
        for name, rows in rows_to_try(config.data, config.environments).items()
    }
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
    """Call `try_environment` for a folder that is removed at once."""
    with tempfile.TemporaryDirectory(prefix="umbra-check-") as scratch, SignalCounter() as signals:
        folder = RunFolder(Path(scratch))
        folder.logs.mkdir()
        try:
            return try_environment(config, folder, child_environ(search), signals, model=model)
        except StageInterrupted as error:
            raise ChildError("interrupted", signals.exit_code) from error
