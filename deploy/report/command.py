"""`umbra report`: a run as a page, and its timeline as a trace file."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from umbra.deploy.files.rollouts import read_rollouts
from umbra.deploy.files.run_folder import RunFolder
from umbra.deploy.report.page import page, recorded_look
from umbra.deploy.report.recording import Recording, gather, write_trace
from umbra.deploy.report.summary import read_status, summary_rows, warning_rows
from umbra.proto.errors import EXIT_DONE, UNREADABLE, UsageError

ROLLOUTS = 8


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--also", "others", multiple=True, type=click.Path(path_type=Path), metavar="FOLDER",
    help="Folder of the same run from another node; may be given several times.",
)  # fmt: skip
def command(run: Path, others: tuple[Path, ...]) -> int:
    """Write RUN/report.html, a page that needs nothing else, and RUN/trace.json for Perfetto.

    RUN is the folder of a run, which may still be going on.
    """
    for path in write_report(RunFolder(run), others):
        click.echo(str(path))
    return EXIT_DONE


def write_report(folder: RunFolder, others: Sequence[Path] = ()) -> list[Path]:
    """Write the page and the timeline of the run in `folder`; where they are.

    Raises:
        UsageError: a folder is not that of a run.
    """
    recording = Recording([folder.path, *others])
    trace, report = folder.path / "trace.json", folder.report
    write_trace(recording, trace)
    summary = _read(folder.summary)
    figures = gather(recording)
    look = recorded_look(
        folder.path.resolve().name,
        figures,
        summary=summary,
        facts=summary_rows(summary) if summary else warning_rows(figures.warnings),
        status=read_status(folder),
        config=_read(folder.config),
        rollouts=list(deque(read_rollouts(folder), maxlen=ROLLOUTS)),
    )
    report.write_text(page(look), encoding="utf-8")
    return [report, trace]


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}  # the run is going on, or was killed
    except UNREADABLE as error:
        raise UsageError(f"{path} cannot be read ({error}): restore it, or remove it") from error
