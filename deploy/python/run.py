"""A run as an object: its steps as they come, its samples, and what can be done to it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbra.deploy.prepare.stage import Stages, last_object
from umbra.deploy.run_folder import Row, RunFolder, StepFollower, read_object, read_rollouts
from umbra.proto.deadline import Deadline
from umbra.proto.errors import UsageError
from umbra.proto.net.keys import open_security
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.run_address import RunAddress, find_run
from umbra.services.process.child import ChildProcess, child_error, umbra_argv
from umbra.services.process.files import is_held

LOOK_S = 0.1
UP = "up"  # the log of `umbra up`
ANSWER_S = 10.0
_FORKING = ThreadPoolExecutor(1)


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. `metrics` has all that was measured in it, by the names of the docs."""

    number: int
    reward: float  # mean of the samples that were trained on
    metrics: dict[str, Any]

    @classmethod
    def of(cls, row: Row) -> Step:
        return cls(row["step"], float(row.get("reward/mean") or 0.0), row)


def start(folder: RunFolder, *flags: str, show: bool = True) -> ChildProcess:
    """Start `umbra up FOLDER` as our child, which ends, in order, when this process does.

    Its lines go to our stdout, which a notebook shows below its cell; its errors to its log, of
    which `Run.wait` reads the last.
    """
    argv = umbra_argv("up", str(folder.path), *flags, *(() if show else ("--quiet",)))
    out = None if show else Path(os.devnull)  # `--quiet` prints the outcome
    # In a thread that lives as long as we do: the child ends when the thread that forked it does.
    return _FORKING.submit(ChildProcess, argv, stdout=out, stderr=folder.log(UP)).result()


class Run:
    """A run in its folder, under way or over. Made by `umbra.train` and `umbra.attach`.

    Iterating gives its steps from the first on, and waits for further ones until the run ends.
    """

    def __init__(self, path: str | Path, child: ChildProcess | None = None) -> None:
        self._folder = RunFolder(Path(path).resolve())
        self.path, self.id = self._folder.path, self._folder.id
        self._child = child
        self._follower = StepFollower(self._folder.metrics)
        self._by_number: dict[int, Step] = {}

    def __repr__(self) -> str:
        return f"<umbra.Run {self.id}: {'under way' if self.under_way else 'over'}>"

    def _steps(self) -> list[Step]:
        """Return all steps so far; of those that a trainer has repeated the newest."""
        self._by_number |= {row["step"]: Step.of(row) for row in self._follower.new()}
        return list(self._by_number.values())

    def __iter__(self) -> Iterator[Step]:
        last = 0
        while True:
            running = self.under_way  # before the look, so that the last steps are seen
            for step in self._steps():
                if step.number > last:
                    last = step.number
                    yield step
            if not running:
                return
            time.sleep(LOOK_S)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return a row for each step so far; `pandas.DataFrame` takes them."""
        return [step.metrics for step in self._steps()]

    def samples(self) -> list[dict[str, Any]]:
        """Return rollouts that were trained on, oldest first: `log.samples` of each step."""
        return list(read_rollouts(self._folder))

    @property
    def summary(self) -> dict[str, Any] | None:
        """Return the outcome, as in summary.json; None while the run is under way."""
        return read_object(self._folder.summary) or None

    @property
    def model(self) -> Path:
        """Return the trained model, a Hugging Face directory; UsageError if there is none yet."""
        if not (self._folder.model / "config.json").is_file():
            raise UsageError(f"run {self.id} has no trained model yet: wait() for its end")
        return self._folder.model

    def evaluate(
        self, prompts: str | Path | None = None, *, samples: int | None = None, greedy: bool = False
    ) -> dict[str, Any]:
        """Measure the trained model: accuracy (the mean reward) and more.

        Args:
            prompts: a prompts file; the run's `eval.prompts` if not given.
            samples: how many to draw; one per prompt if not given.
            greedy: take the most likely token instead of sampling.

        Raises:
            UsageError: there is no trained model yet, or there are no prompts.
            UmbraError: the evaluation failed.
        """
        self.model  # noqa: B018 - refuses a run that has none
        arguments = ["eval", str(self.path), "--json"]
        arguments += ["--prompts", str(prompts)] if prompts else []
        arguments += ["--samples", str(samples)] if samples else []
        arguments += ["--greedy"] if greedy else []
        return last_object(Stages(self._folder).run("evaluate", *arguments))

    @property
    def under_way(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return is_held(self.path)

    def wait(self, timeout_s: float = math.inf) -> dict[str, Any]:
        """Return the summary, when the run has ended.

        Raises:
            DeadlineError: it has not within `timeout_s` seconds.
            UmbraError: it ended badly, with the `exit_code` and sentence of `umbra up`.
        """
        self._await_end(timeout_s)
        summary, child = self.summary, self._child
        if summary is None:
            sentence = Stages(self._folder).last_line(UP) if child else ""
            reason = f"run {self.id} ended without a summary: see {self._folder.logs}"
            raise child_error(sentence or reason, (child and child.poll()) or 6)
        if summary["exit_code"]:
            raise child_error(summary["exit_reason"], int(summary["exit_code"]))
        return summary

    def stop(self, timeout_s: float = math.inf) -> None:
        """End the run in order and wait for that; `umbra up` with its folder goes on later.

        Raises:
            UsageError: another process has just started it, and its buffer is not up yet.
            DeadlineError: it has not ended within `timeout_s` seconds.
        """
        if self._child is not None:
            self._child.terminate()
        elif self.under_way:
            address = RunAddress.read(self.path)
            if address is None:
                raise UsageError(f"run {self.id}: its buffer is not up yet; stop it again later")
            security = open_security(address.keys, ["operator", "monitor"])
            with StatusClient(address.broker, security) as client:
                client.drain(ANSWER_S, reason="stopped from Python")
        self._await_end(timeout_s)

    def _await_end(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s, f"run {self.id} has not ended")
        while self.under_way:
            deadline.check()
            time.sleep(LOOK_S)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_raised: object) -> None:
        if self.under_way:
            self.stop()


def attach(run: str | Path = "") -> Run:
    """Return a run of this machine: by its folder or its id in `runs/`; if empty, the newest one.

    UsageError says that there is none.
    """
    return Run(find_run(str(run)))
