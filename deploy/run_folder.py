"""The folder that receives everything about one run, and the readers of its files."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from umbra.proto.errors import UNREADABLE, UsageError
from umbra.services.config.loader import ORIGIN, rewrite_paths
from umbra.services.process import files
from umbra.services.process.files import DISK, LOCK, READABLE_MODE, open_regular
from umbra.services.process.metrics import parse_row
from umbra.services.reporting import number

LINE_CHARS = 64 << 20  # of a row at most, in files that others may have written
SIGNALLED = 128  # exit codes above it are of signals
CHECK = "environment-check"  # the stage, and its logs, that tries the environment before a run
Row = dict[str, Any]


def new_run_id(name: str) -> str:
    """Return `<name>-<date>-<time>-<4 hex digits>`: sorts by time, and two at once differ."""
    return f"{name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


class _Below:
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _owner: type) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    path: Path

    config = _Below("config.json")
    origin = _Below(ORIGIN)  # `search`: where modules are looked for; `folder`: this one
    metrics = _Below("metrics.jsonl")  # rows of all services
    samples = _Below("samples.jsonl")  # rollouts that were trained on (`log.samples`)
    summary = _Below("summary.json")
    report = _Below("report.html")
    buffer = _Below("buffer.json")  # its last status
    checkpoints = _Below("checkpoints")
    model = _Below("model")
    logs = _Below("logs")
    inputs = _Below("inputs")  # of a run begun from Python: prompts, and functions as source

    @property
    def id(self) -> str:
        return self.path.name

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @classmethod
    def create(cls, parent: str | Path, name: str) -> RunFolder:
        """Make a new folder for a run called `name`; UsageError if `parent` is not writable."""
        folder = cls(Path(parent).resolve() / new_run_id(name))
        with files.explained(f"cannot create {folder.path}", "name another folder"):
            folder.logs.mkdir(parents=True)
        return folder

    def write_origin(self, search: Iterable[Path]) -> None:
        origin = {"search": [*map(str, search)], "folder": f"{self.path}/"}
        text = json.dumps(origin, ensure_ascii=False) + "\n"
        DISK.replace(self.origin, text.encode(), mode=READABLE_MODE)

    @classmethod
    def existing(cls, path: str | Path, *, extends: bool = False) -> RunFolder:
        """Return the folder of a run to resume, by `extends` past its end; or UsageError."""
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
        """Return whether the run has reached its end; UsageError if its summary is unreadable."""
        remedy = "remove it, and the run goes on if it has not reached its end"
        return read_object(self.summary, remedy).get("exit_code") == 0

    def read_origin(self) -> dict[str, Any]:
        remedy = "remove it, and modules are looked for in this folder alone"
        return read_object(self.origin, remedy)

    def discard(self) -> None:
        """Remove the folder of a run that was refused; what others have put there stays."""
        for path in (self.config, self.origin, self.path / LOCK, *self.logs.glob(f"{CHECK}.*")):
            path.unlink(missing_ok=True)
        for folder in (self.logs, self.path):
            with suppress(OSError):  # not empty
                folder.rmdir()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other `umbra up` out of the folder; UsageError if one is there, or it is closed."""
        fault = f"the run in {self.path} is under way, started by"
        remedy = "watch it with `umbra monitor`, or stop it first"
        with ExitStack() as stack:
            with files.explained(f"cannot write to {self.path}"):
                stack.enter_context(files.folder_lock(self.path, fault, remedy))
            yield

    def remember(self) -> dict[Path, bytes | None]:
        """Return the files that a refused start must restore; None for a missing one."""
        paths = (self.config, self.origin, self.buffer, self.summary)
        return {path: path.read_bytes() if path.is_file() else None for path in paths}

    @staticmethod
    def put_back(remembered: Mapping[Path, bytes | None]) -> None:
        for path, content in remembered.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.write_bytes(content)

    def forget_end(self) -> None:
        """Remove the final status and summary of an earlier life of this run."""
        for path in (self.buffer, self.summary):
            path.unlink(missing_ok=True)


def read_object(path: Path, remedy: str = "") -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file.

    Where it holds none, UsageError names the `remedy`; without one it is as if there were no file.
    """
    value, reason = None, "it holds no JSON object"
    try:
        value = json.loads(rewrite_paths(files.read_regular(path).decode(), path))
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE) as error:
        reason = str(error)
    if remedy and not isinstance(value, dict):
        raise UsageError(f"{path} cannot be read ({reason}): {remedy}")
    return value if isinstance(value, dict) else {}


def tail(path: Path, limit: int = 16 << 10) -> list[str]:
    """Return the lines in the last `limit` bytes of a file, but empty ones; none if unreadable."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - limit))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()]


class StepFollower:
    """Reads the rows of steps, or of other `kinds`, that are appended to a file of metrics."""

    def __init__(self, path: Path, *kinds: str) -> None:
        self._path = path
        self._marks = [f'"kind":"{kind}"' for kind in kinds or ("step",)]
        self._offset = 0

    def new(self) -> list[Row]:
        """Return the rows since the last call; a line that is not whole waits."""
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        lines = complete.decode(errors="replace").splitlines()
        matches = [line for line in lines if any(mark in line for mark in self._marks)]
        return [row for line in matches if (row := parse_row(line)) is not None]


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of metrics in a file, if there is one, without lines that a crash has cut."""
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(fd, encoding="utf-8", errors="replace") as file:
        for line in iter(partial(file.readline, LINE_CHARS), ""):
            if line.endswith("\n") and (row := parse_row(line)) is not None:
                yield row


@contextmanager
def only_rows_of_runs(path: Path) -> Iterator[None]:
    """Raise UsageError where the block fails on the content of `path`: no run has written it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} holds what no run has written ({type(error).__name__}: {error}): restore it, "
            "or remove it"
        ) from error


@contextmanager
def rewritten(path: Path) -> Iterator[TextIO]:
    """Give a new file that takes the place of `path` at the end, whatever is there."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)  # which may be a link, or a pipe
    with part.open("x", encoding="utf-8") as file:
        yield file
    part.replace(path)


def read_rollouts(folder: RunFolder) -> Iterator[Row]:
    """Yield all rollouts, oldest first, each once, also if a trainer has repeated its step."""
    keys: set[tuple[int, str]] = set()
    for row in read_rows(folder.samples):
        name = (row["step"], row["sample"])
        if row["kind"] == "rollout" and name not in keys:
            keys.add(name)
            yield row


def rollout_text(rollout: Row) -> str:
    """Return a rollout to read."""
    facts = [f"step {rollout['step']}, {rollout['sample']}: reward {number(rollout['reward'])}"]
    if parts := [f"{name} {number(value)}" for name, value in rollout["reward_parts"].items()]:
        facts[0] += f" ({', '.join(parts)})"
    facts.append(f"{rollout['tokens']} tokens")
    counts = [(name, rollout.get(name, 1)) for name in ("turns", "branches")]
    facts += [f"{count} {name}" for name, count in counts if count > 1]
    facts += [rollout["finish_reason"], f"staleness {rollout['staleness']}"]
    return f"--- {', '.join(facts)}\n{rollout['prompt']}\n>>> {rollout['response']}\n"
