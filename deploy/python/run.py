"""A run as an object: its steps as they come, its samples, and what can be done to it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from umbra.deploy.files.rollouts import read_rollouts
from umbra.deploy.files.run_folder import LineFollower, RunFolder
from umbra.deploy.prepare.stage import last_object, run_stage
from umbra.deploy.python.child import RunChild
from umbra.proto.access import KeyRole
from umbra.proto.deadline import Deadline
from umbra.proto.errors import UsageError
from umbra.proto.net.keys import open_security
from umbra.services.config import SecurityConfig
from umbra.services.monitor.client import StatusClient
from umbra.services.monitor.run_address import RunAddress, find_run
from umbra.services.monitor.view import sparkline, status_dict
from umbra.services.process.child import ChildError, child_environ
from umbra.services.process.files import is_held
from umbra.services.process.metrics import parse_row
from umbra.services.prompts.readers import is_elsewhere

LOOK_S = 0.1
CURVE = 80  # characters
ANSWER_S = 10.0
CHECKPOINT_S = 600.0
WATCHING: tuple[KeyRole, ...] = ("monitor", "operator")
OPERATING: tuple[KeyRole, ...] = ("operator", "monitor")


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. `metrics` has all that was measured in it, by the names of the docs."""

    number: int
    reward: float  # mean of the samples that were trained on
    metrics: dict[str, Any]


class RemoteRun:
    """A run of which only the address is known: it can be looked at and operated.

    All methods raise `DeadlineError` if its buffer does not answer within 10 seconds.

    Args:
        broker: address of its buffer, tcp://host:port.
        keys: folder of its keys; empty if it has none.
    """

    def __init__(self, broker: str, keys: str = "") -> None:
        self._address = RunAddress(broker, keys)

    @property
    def address(self) -> RunAddress:
        return self._address

    def __repr__(self) -> str:
        return f"<umbra.RemoteRun at {self._address.broker}>"

    def status(self) -> dict[str, Any]:
        """The state of all that is under way, as `umbra status --json` prints it."""
        with self._client(WATCHING) as client:
            return status_dict(client.status(ANSWER_S))

    def pause(self, reason: str = "") -> None:
        """Have no samples and no batches handed out until `resume`."""
        with self._client(OPERATING) as client:
            client.pause(reason, ANSWER_S)

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._client(OPERATING) as client:
            client.resume(ANSWER_S)

    def checkpoint(self, timeout_s: float = CHECKPOINT_S) -> int:
        """Have the trainer save its state; the step after which it did."""
        with self._client(OPERATING) as client:
            return client.checkpoint(timeout_s)

    def drain(self, reason: str = "drained from Python") -> None:
        """Have the run end in order; returns at once."""
        with self._client(OPERATING) as client:
            client.drain("", reason, ANSWER_S)

    def _client(self, roles: tuple[KeyRole, ...]) -> StatusClient:
        address = self.address
        security = open_security(SecurityConfig(keys=address.keys), roles)
        return StatusClient(address.broker, security)


class Run(RemoteRun):
    """A run in its folder, under way or over. Made by `umbra.train` and `umbra.attach`.

    Iterating gives its steps from the first on, and waits for further ones until the run ends.
    """

    def __init__(self, path: str | Path, child: RunChild | None = None) -> None:
        self._folder = RunFolder(Path(path).resolve())
        self._child = child
        self._steps = _StepRows(self._folder.metrics)

    @property
    def id(self) -> str:
        return self._folder.id

    @property
    def path(self) -> Path:
        return self._folder.path

    def __repr__(self) -> str:
        return f"<umbra.Run {self.id}: {'under way' if self.under_way else 'over'}>"

    # -- what it has done -------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        last = 0
        while True:
            running = self.under_way  # before the look, so that the last steps are seen
            for number, row in self._steps.look().items():
                if number > last:
                    last = number
                    yield Step(number, _reward(row), row)
            if not running:
                return
            time.sleep(LOOK_S)

    @property
    def metrics(self) -> Any:
        """A row for each step so far: a pandas DataFrame if pandas is installed, else dicts."""
        rows = list(self._steps.look().values())
        try:
            import pandas  # pyright: ignore[reportMissingImports, reportMissingModuleSource]
        except ModuleNotFoundError:
            return rows
        return pandas.DataFrame(rows)  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]

    def samples(self) -> list[dict[str, Any]]:
        """Return rollouts that were trained on, oldest first: `log.samples` of each step."""
        return list(read_rollouts(self._folder))

    @property
    def summary(self) -> dict[str, Any] | None:
        """Return the outcome, as in summary.json; None while the run is under way."""
        try:
            return json.loads(self._folder.summary.read_bytes())
        except FileNotFoundError:
            return None

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face directory.

        Raises:
            UsageError: there is none yet.
        """
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
            ChildError: the evaluation failed.
        """
        model = self.model
        config = json.loads(self._folder.config.read_bytes())
        chosen = str(prompts or config["eval"]["prompts"])
        if not is_elsewhere(chosen):
            chosen = str(Path(chosen).resolve()) if chosen else ""
        if not chosen:
            raise UsageError("evaluate: give prompts, or begin the run with eval_prompts")
        arguments = ["eval", str(model), "--json", "--config", str(self._folder.config)]
        arguments += ["--prompts", chosen]
        arguments += ["--samples", str(samples)] if samples else []
        arguments += ["--greedy"] if greedy else []
        search = [Path(path) for path in self._folder.read_origin().get("search", [])]
        environ = child_environ(search)
        return last_object(
            run_stage("evaluate", tuple(arguments), folder=self._folder, environ=environ)
        )

    # -- while it is under way --------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        if self._child is not None:
            return self._child.poll() is None
        return is_held(self._folder.path)

    def wait(self, timeout_s: float = math.inf) -> dict[str, Any]:
        """The summary, when the run has ended.

        Raises:
            DeadlineError: it has not within `timeout_s` seconds.
            UmbraError: it ended badly; `exit_code` and the sentence are those of `umbra up`.
        """
        deadline = Deadline(timeout_s, f"run {self.id} has not ended")
        while self.under_way:
            deadline.check()
            time.sleep(LOOK_S)
        summary = self.summary
        if summary is None:
            why = self._child.said if self._child is not None else ""
            code = self._child.poll() if self._child is not None else None
            raise ChildError(
                why or f"run {self.id} ended without a summary: see {self._folder.logs}", code or 6
            )
        if summary["exit_code"]:
            raise ChildError(summary["exit_reason"], int(summary["exit_code"]))
        return summary

    def stop(self, timeout_s: float = math.inf) -> None:
        """End the run in order and wait for that; `umbra up` with its folder goes on later.

        Raises:
            DeadlineError: it has not ended within `timeout_s` seconds.
        """
        if self._child is not None:
            self._child.terminate()
        elif self.under_way:
            self.drain("stopped from Python")
        deadline = Deadline(timeout_s, f"run {self.id} has not ended")
        while self.under_way:
            deadline.check()
            time.sleep(LOOK_S)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_raised: object) -> None:
        if self.under_way:
            self.stop()

    @property
    def address(self) -> RunAddress:
        """Where its buffer is.

        Raises:
            UsageError: the run is not under way.
        """
        if (found := RunAddress.read(self._folder.path)) is None:
            raise UsageError(f"run {self.id} is not under way, or its buffer is not up yet")
        return found

    def _repr_html_(self) -> str:
        """Return the run for a notebook: its state in a line, and the curve of its reward."""
        rewards = [_reward(row) for row in self._steps.look().values()]
        state = f"step {len(rewards)}" + (f", reward {rewards[-1]:.3f}" if rewards else "")
        if (summary := self.summary) is not None:
            state += f"; {summary['exit_reason']}"
        curve = sparkline(rewards, CURVE)
        return f"<div><b>{escape(self.id)}</b>: {escape(state)}</div><pre>reward {curve}</pre>"


class _StepRows:
    """The rows of the steps in a file of metrics; each look reads what is new in it."""

    def __init__(self, path: Path) -> None:
        self._follower = LineFollower(path)
        self._rows: dict[int, dict[str, Any]] = {}

    def look(self) -> dict[int, dict[str, Any]]:
        """Return all rows so far by step; of repeated ones the newest."""
        for line in self._follower.lines():
            row = parse_row(line) if '"kind":"step"' in line else None
            if row is not None:
                self._rows[row["step"]] = row
        return dict(self._rows)


def _reward(step: Mapping[str, Any]) -> float:
    return float(step.get("reward/mean") or 0.0)


def attach(run: str | Path = "", *, keys: str = "") -> Run | RemoteRun:
    """A run: its folder, its id in `runs/`, the address of its buffer, or the newest one here.

    Args:
        run: nothing for the newest run in `runs/`.
        keys: folder of the keys of a run at an address; those of a run here are known.

    Raises:
        UsageError: there is none.
    """
    if "://" in str(run):
        return RemoteRun(str(run), keys)
    return Run(find_run(str(run)))
