"""Tries the user's code before a run begins, in a process that may fail or hang."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from umbra.deploy.files.run_folder import CHECK, RunFolder
from umbra.deploy.prepare.stage import StageInterrupted, Waiting, run_stage
from umbra.services.buffer.prompts import first_rows
from umbra.services.config import RunConfig
from umbra.services.config.loader import to_json
from umbra.services.process.child import ChildError, child_environ
from umbra.services.process.files import DISK, READABLE_MODE
from umbra.services.process.signals import SignalCounter


def try_environment(
    config: RunConfig,
    folder: RunFolder,
    environ: Mapping[str, str],
    interrupts: SignalCounter,
    waiting: Waiting | None = None,
) -> None:
    """Write `config` to `folder`, and call its reward or environment once, on the first prompt.

    Raises:
        ChildError: that failed, or took longer than `environment.timeout_s`.
        StageInterrupted: a signal came.
    """
    DISK.replace(folder.config, to_json(config), mode=READABLE_MODE)
    rows = folder.logs / f"{CHECK}.rows"
    rows.write_bytes(msgspec.json.encode(first_rows(config.data, config.environments)))
    run_stage(
        CHECK,
        (str(folder.config), str(rows)),
        folder=folder,
        environ=environ,
        interrupts=interrupts,
        module="umbra.services.generator.checks",
        waiting=waiting,
    )


def try_aside(config: RunConfig, search: Sequence[Path]) -> None:
    """`try_environment` without a run: in a folder that is removed at once."""
    with tempfile.TemporaryDirectory(prefix="umbra-check-") as scratch, SignalCounter() as signals:
        folder = RunFolder(Path(scratch))
        folder.logs.mkdir()
        try:
            try_environment(config, folder, child_environ(search), signals)
        except StageInterrupted as error:
            raise ChildError("interrupted", signals.exit_code) from error
