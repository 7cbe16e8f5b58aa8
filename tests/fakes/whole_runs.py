"""Whole runs by `umbra up` in a project folder, of which nothing is left after the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest
from fakes.commands import SEARCH, UMBRA, Popen
from fakes.slowness import limit, until

from umbra.services.process.parent import GRACE_S

QUIET_S = 60.0  # of a short run: importing torch in every process takes most of it
DEADLINE_S = limit(QUIET_S)
LEFT_S = 2.5  # until those that were killed with their session are gone
ORPHANS_S = GRACE_S + 5.0  # until the children of a killed supervisor are


@dataclass
class UpProcess:
    """An `umbra up` under way; waits are `quiet_s` seconds long on a quiet machine."""

    popen: subprocess.Popen[str]
    project: Path
    quiet_s: float = QUIET_S
    lines: list[str] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        (found,) = (path for path in (self.project / "runs").iterdir() if path.name != "keys")
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for `condition` while it runs."""
        met = False

        def over() -> bool:
            nonlocal met
            met = bool(condition())
            return met or self.popen.poll() is not None

        until(over, what, quiet_s=self.quiet_s)
        assert met, f"ended before {what}: {self.popen.communicate()}"

    def until_step(self, number: int) -> None:
        self.until(lambda: len(self.steps()) >= number, f"step {number}")

    def broker(self) -> str:
        """Where its buffer listens, once it has said so."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if "its buffer at " in line:
                return line.split("its buffer at ")[1].strip()
        raise AssertionError("no address was printed")

    def steps(self) -> list[dict[str, Any]]:
        return self.rows("step")

    def rows(self, kind: str) -> list[dict[str, Any]]:
        path = next(iter((self.project / "runs").glob("*/metrics.jsonl")), None)
        if path is None:
            return []
        lines = path.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if row["kind"] == kind]

    def log(self, service: str) -> str:
        return (self.run_dir / "logs" / f"{service}.log").read_text()

    def pid(self, *words: str) -> int:
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or ()
            of_run = any(word.startswith(str(self.run_dir)) for word in line)
            if of_run and all(word in line for word in words):
                return process.pid
        raise AssertionError(f"no process with {words} is running")

    def kill(self, service: str) -> None:
        os.kill(self.pid(service), 9)

    def finish(self, *codes: int) -> dict[str, Any]:
        """Wait until it ends with one of `codes` (0), its ledger balanced; return the summary."""
        out, err = self.popen.communicate(timeout=limit(self.quiet_s))
        self.lines = (out + err).splitlines()
        assert self.popen.returncode in (codes or (0,)), self.lines
        summary = json.loads((self.run_dir / "summary.json").read_text())
        assert summary["ledger"]["balance"] == 0, summary["ledger"]
        return summary


Up: TypeAlias = Callable[..., UpProcess]


@pytest.fixture
def up(project: Path) -> Iterator[Up]:
    """Start `umbra up RUN` with settings and flags; `program` is another one than `umbra`."""
    started: list[UpProcess] = []

    def start(
        *settings: str,
        flags: tuple[str, ...] = (),
        run: str | Path = "run.toml",
        quiet_s: float = QUIET_S,
        program: Sequence[str | Path] = UMBRA[1:],
    ) -> UpProcess:
        popen = Popen(
            [sys.executable, *program, "up", str(run), *sets(*settings), *flags],
            cwd=project,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SEARCH},
        )
        started.append(UpProcess(popen, project, quiet_s))
        return started[-1]

    yield start
    left_s = LEFT_S
    for process in started:
        if process.popen.poll() is None:
            process.popen.kill()
            left_s = ORPHANS_S
        process.popen.communicate()
    if started and (project / "runs").exists():
        until(lambda: not leftovers(project), lambda: leftovers(project), quiet_s=left_s)


def sets(*settings: str) -> list[str]:
    return [word for one in settings for word in ("--set", one)]


def leftovers(project: Path) -> list[str]:
    """Return processes and shared memory of the runs in `project`."""
    runs = project / "runs"
    memory = [
        str(path) for run in runs.iterdir() for path in Path("/dev/shm").glob(f"umbra-{run.name}*")
    ]
    lines = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    return memory + [
        " ".join(line) for line in lines if any(word.startswith(str(runs)) for word in line)
    ]
