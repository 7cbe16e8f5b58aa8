"""The folder that receives everything about one run."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbra.proto.errors import UNREADABLE, UsageError
from umbra.services.process.files import LOCK, HeldError, folder_lock, open_regular, read_regular
from umbra.services.process.metrics import parse_row

LAST_LINES_BYTES = 16 << 10
CHECK = "environment-check"
"""Name of the stage, and of its logs, that tries the environment before a run begins."""
ENDED = "remove it, and the run goes on if it has not reached its end"
BEGUN = "remove it, and the accuracy before training is measured again"


def new_run_id(name: str, now: float | None = None) -> str:
    """`<name>-<date>-<time>-<4 hex digits>`: sorts by time, and two at once differ."""
    moment = time.localtime(time.time() if now is None else now)
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S', moment)}-{secrets.token_hex(2)}"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of a run's files."""

    path: Path

    @classmethod
    def create(cls, parent: str | Path, name: str) -> RunFolder:
        """A new folder for a run called `name`.

        Raises:
            UsageError: `parent` cannot be written to.
        """
        folder = cls(Path(parent).resolve() / new_run_id(name))
        try:
            folder.logs.mkdir(parents=True)
        except OSError as error:
            raise UsageError(
                f"cannot create {folder.path}: {error.strerror}; choose another run.dir"
            ) from error
        return folder

    @classmethod
    def existing(cls, path: str | Path, *, extends: bool = False) -> RunFolder:
        """The folder of a run that was begun, and is to go on; `extends`: also beyond its end.

        Raises:
            UsageError: it is none, or the run has reached its end.
        """
        folder = cls(Path(path).resolve())
        if not folder.config.is_file():
            raise UsageError(f"{path} is no run's folder: it has no {folder.config.name}")
        if (folder.path / "tokenizer_config.json").is_file():
            raise UsageError(f"{path} is no run's folder, but a model's: name a run file")
        if folder.has_ended() and not extends:
            raise UsageError(
                f"the run in {path} has reached its end: its model is {folder.model}; train on "
                f"with `umbra up {path} --set run.steps=N`, or begin another run with that as "
                "model.path"
            )
        folder.logs.mkdir(exist_ok=True)
        return folder

    def has_ended(self) -> bool:
        """Whether the run has reached its end.

        Raises:
            UsageError: its summary cannot be read.
        """
        return self.summary.is_file() and _read(self.summary, ENDED).get("exit_code") == 0

    def discard(self) -> None:
        """Remove the folder of a run that was refused; what others have put there stays."""
        for path in (self.config, self.path / LOCK, *self.logs.glob(f"{CHECK}.*")):
            path.unlink(missing_ok=True)
        for folder in (self.logs, self.path):
            with suppress(OSError):  # not empty
                folder.rmdir()

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def origin(self) -> Path:
        """What a run that goes on needs to know of its beginning, besides the configuration."""
        return self.path / "origin.json"

    def read_origin(self) -> dict[str, Any]:
        """`search`: where modules are looked for; `before`: accuracies; what is known of them."""
        return _read(self.origin, BEGUN) if self.origin.is_file() else {}

    @property
    def metrics(self) -> Path:
        """What every service measured, as JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def report(self) -> Path:
        """The run as a page."""
        return self.path / "report.html"

    @property
    def samples(self) -> Path:
        """Rollouts that were trained on, as text, in JSON lines (`log.samples`)."""
        return self.path / "samples.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def buffer(self) -> Path:
        return self.path / "buffer.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other `umbra up` out of this folder for the block.

        Raises:
            UsageError: one is there already, or the folder cannot be written to.
        """
        with ExitStack() as stack:
            try:
                stack.enter_context(folder_lock(self.path))
            except HeldError as error:
                raise UsageError(
                    f"the run in {self.path} is under way, started by {error}: watch it with "
                    "`umbra monitor`, or stop it first"
                ) from error
            except OSError as error:
                raise UsageError(f"cannot write to {self.path}: {error.strerror}") from error
            yield

    def remember(self) -> dict[Path, bytes | None]:
        """What a refused start has to leave as it was; None for a file that is not there."""
        paths = (self.config, self.origin, self.buffer, self.summary)
        return {path: path.read_bytes() if path.is_file() else None for path in paths}

    @staticmethod
    def put_back(remembered: Mapping[Path, bytes | None]) -> None:
        """Make it so again."""
        for path, content in remembered.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)

    def forget_end(self) -> None:
        """Remove what an earlier life of this run has left as its last word."""
        for path in (self.buffer, self.summary):
            path.unlink(missing_ok=True)

    @property
    def inputs(self) -> Path:
        """What a run that was begun from Python was given: prompts, and functions as source."""
        return self.path / "inputs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"


def _read(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file of a run.

    Raises:
        UsageError: it holds none.
    """
    try:
        found = json.loads(read_regular(path))
    except (OSError, *UNREADABLE) as error:
        raise UsageError(f"{path} cannot be read ({error}): {remedy}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no JSON object: {remedy}")
    return found


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines of a text file that are not empty; none if there is no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LAST_LINES_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


class LineFollower:
    """Reads the lines that others append to a file, as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> list[str]:
        """Whole lines that were added since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics in a file; lines that a crash or a full disk has cut are left out."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return
    with os.fdopen(fd, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n") and (row := parse_row(line)) is not None:
                yield row
