"""A whole run on this machine: eval, the supervised loop, eval again, summary."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from umbra.deploy.files.run_folder import RunFolder, last_lines
from umbra.deploy.files.shown import command_line
from umbra.deploy.prepare.preflight import check_one_machine, check_run
from umbra.deploy.prepare.stage import (
    FORESEEN_CODES,
    StageInterrupted,
    last_object,
    last_said,
    run_stages,
    try_environment,
)
from umbra.deploy.report.command import write_report
from umbra.deploy.report.summary import RunOutcome, read_status, summarise, write_summary
from umbra.deploy.run.live import Progress, View
from umbra.deploy.run.programs import (
    BUFFER,
    TRAINER,
    buffer_program,
    other_programs,
)
from umbra.proto.deadline import Deadline
from umbra.proto.errors import EXIT_DONE, StartupError, UmbraError
from umbra.proto.net.keys import open_security
from umbra.services.buffer.command import NEW_ADDRESS
from umbra.services.config import RunConfig
from umbra.services.monitor.run_address import RunAddress
from umbra.services.process.child import ChildError, ChildProcess, child_environ
from umbra.services.process.files import DISK, READABLE_MODE
from umbra.services.process.signals import SignalCounter
from umbra.services.process.supervisor import Program, Supervisor
from umbra.services.weights.arena import remove_leftovers

POLL_S = 0.05
START_S = 60.0  # for the buffer to bind; a store has to be opened, prompts to be read
LOG_LINES = 15
EXIT_DRAINED = 128 + signal.SIGTERM  # `umbra drain` is as if it had got this signal


class Up:
    """One run in its folder.

    Args:
        config: resolved, with absolute paths.
        search: where the user's modules are looked for.
        evaluate: measure the model before and after, if `eval.prompts` is set.
        started: when what the user waits for began (`time.monotonic`); now, if not given.
        programs: what is started beside the buffer, whose address is the last argument.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        view: View,
        interrupts: SignalCounter,
        search: Sequence[Path] = (),
        evaluate: bool = True,
        started: float | None = None,
        programs: Callable[[RunConfig, RunFolder, str], list[Program]] = other_programs,
    ) -> None:
        self.config = config
        self.folder = folder
        self.environ: Mapping[str, str] = child_environ(search)
        self._search = search
        self._view = view
        self._interrupts = interrupts
        self._programs = programs
        self._evaluate = evaluate and bool(config.eval.prompts)
        self._started = time.monotonic() if started is None else started
        self._outcome: dict[str, Any] = {}
        self._addressed = False  # somebody was told where the buffer is
        self._trained = False  # a step in this life of the run

    def run(self) -> dict[str, Any]:
        """Run to the end, good or bad; the summary, which is also in the folder.

        Raises:
            UsageError: the configuration cannot work; nothing was started.
            ChildError: the run was to go on, and one of its services refuses that: the folder is as
                it was before, but for its logs.
        """
        before = self.folder.remember() if self.folder.config.is_file() else None
        try:
            self.check()
        except (UmbraError, StageInterrupted) as error:
            if before is not None:
                self.folder.put_back(before)
            else:
                self.folder.discard()
            if isinstance(error, StageInterrupted):
                code = self._interrupts.exit_code
                raise ChildError("interrupted before anything was started", code) from error
            raise
        try:
            reason, code = self._phases()
        except StageInterrupted:
            reason, code = "interrupted", self._interrupts.exit_code
        except UmbraError as error:
            reason, code = str(error), error.exit_code
        if before is not None and code in FORESEEN_CODES and not self._trained:
            self.folder.put_back(before)
            raise ChildError(reason, code)
        if not self.folder.config.is_file():
            raise ChildError(reason, code)
        total_s = time.monotonic() - self._started
        outcome = RunOutcome(exit_reason=reason, exit_code=code, total_s=total_s, **self._outcome)
        summary = summarise(self.folder, outcome)
        if code == EXIT_DONE and (bad := _contradiction(summary)):
            summary["exit_reason"], summary["exit_code"] = bad, UmbraError.exit_code
        write_summary(self.folder, summary)
        self._report()
        return summary

    def _report(self) -> None:
        """Write page and timeline; a run without metrics has none."""
        if self.folder.metrics.exists():
            try:
                write_report(self.folder)
            except OSError as error:
                self._view.say(f"no report was written: {error}")

    def check(self) -> None:
        """Write the resolved configuration and try everything that can be tried beforehand."""
        check_one_machine(self.config)
        check_run(self.config)
        try_environment(
            self.config,
            self.folder,
            self.environ,
            self._interrupts,
            waiting=partial(self._view.doing, "trying the environment on the first prompt"),
        )

    def _phases(self) -> tuple[str, int]:
        remove_leftovers(self.folder.id)  # of a life of this run that was killed
        self.folder.forget_end()
        origin = self.folder.read_origin()
        if self._evaluate:
            known = origin.get("before")
            self._outcome["before"] = known or self._eval("before", self.config.model.name)
        search = [str(path) for path in self._search]
        found = {"search": search, "before": self._outcome.get("before")}
        origin = json.dumps(found).encode() + b"\n"
        DISK.replace(self.folder.origin, origin, mode=READABLE_MODE)
        reason, code = self._supervise()
        if code == EXIT_DONE and self._evaluate:
            self._outcome["after"] = self._eval("after", str(self.folder.model))
        return reason, code

    # -- evaluation -------------------------------------------------------------------------------

    def _eval(self, when: str, model: str) -> dict[str, float]:
        """Accuracy of `model` on the held-out prompts, sampled and greedy at the same time."""
        stages = {"accuracy": self._eval_arguments(model)}
        if self.config.eval.greedy:
            stages["greedy"] = (*stages["accuracy"], "--greedy")
        texts = run_stages(
            {f"eval-{when}-{kind}": arguments for kind, arguments in stages.items()},
            folder=self.folder,
            environ=self.environ,
            interrupts=self._interrupts,
            waiting=partial(self._view.doing, f"{when} training: {_heldout(self.config)}"),
        )
        results = {
            kind: float(last_object(texts[f"eval-{when}-{kind}"])["accuracy"]) for kind in stages
        }
        shown = ", ".join(f"{name} {value:.3f}" for name, value in results.items())
        self._view.say(f"{when} training: {shown}")
        return results

    def _eval_arguments(self, model: str) -> tuple[str, ...]:
        heldout = self.config.eval
        return (
            *("eval", model, "--json", "--config", str(self.folder.config)),
            *("--samples", str(heldout.samples)),
        )

    # -- the loop ---------------------------------------------------------------------------------

    def _supervise(self) -> tuple[str, int]:
        supervisor = Supervisor(
            self._spawn,
            goal=TRAINER,
            report=self._view.say,
            last_line=lambda name: last_said(self.folder, name),
        )
        progress = Progress(self.folder)
        progress.poll()
        steps = len(progress.rewards)
        try:
            self._start(supervisor, progress)
            while supervisor.poll():
                if not self.folder.config.is_file():
                    raise UmbraError(
                        f"{self.folder.path} was removed under way, and what the run has learned "
                        "with it: all processes were stopped"
                    )
                self._turn(supervisor, progress)
        finally:
            progress.poll()
            self._trained = len(progress.rewards) > steps
            if progress.status is not None:
                self._outcome["seen"] = msgspec.to_builtins(progress.status)
            self._view.update(progress, supervisor.states())
            progress.close()
            self._end_all(supervisor)
        self._outcome["usage"] = supervisor.usage()
        self._outcome["restarts"] = supervisor.restarts()
        return self._verdict(supervisor)

    def _spawn(self, program: Program) -> ChildProcess:
        log, environ = self.folder.log(program.name), {**self.environ, **program.environ}
        argv = program.argv
        if program.name == BUFFER and not self._addressed:
            argv = (*argv, NEW_ADDRESS)  # another process may have the port that a former life had
        return ChildProcess(argv, environ=environ, stdout=log, stderr=log)

    def _start(self, supervisor: Supervisor, progress: Progress) -> None:
        """Start the buffer, and the others once it has said where it is."""
        supervisor.start(buffer_program(self.config, self.folder))
        deadline = Deadline(START_S, "the buffer was not up", error=StartupError)
        while (facts := supervisor.ready(BUFFER)) is None:
            if not supervisor.poll() or supervisor.draining:
                return
            deadline.check()
            self._turn(supervisor, progress)
        broker = str(facts["broker"])
        self._addressed = True
        progress.watch(broker, open_security(self.config.security, ["monitor"]))
        RunAddress(broker, self.config.security.keys).write(self.folder.path)
        self._view.say(f"run {self.folder.id}, its buffer at {broker}")
        self._view.say(f"to watch it:\n  {command_line('monitor', self.folder.path)}")
        for program in self._programs(self.config, self.folder, broker):
            supervisor.start(program)

    def _turn(self, supervisor: Supervisor, progress: Progress) -> None:
        """One turn of the loop: heed signals, show progress, sleep a little."""
        if self._interrupts.count >= 2:
            supervisor.kill()
        elif self._interrupts.count == 1 and not supervisor.draining:
            self._view.say("stopping; once more to end at once")
            supervisor.drain()
        progress.poll()
        if progress.status is None:
            self._view.doing("starting", ", ".join(_starting(supervisor.states())))
        self._view.update(progress, supervisor.states())
        self._interrupts.wait(POLL_S)

    def _end_all(self, supervisor: Supervisor) -> None:
        """End all processes and remove shared memory, whatever happened."""
        supervisor.close()
        RunAddress.forget(self.folder.path)
        remove_leftovers(self.folder.id)

    def _verdict(self, supervisor: Supervisor) -> tuple[str, int]:
        failure = supervisor.failure
        if failure is not None:
            if failure.exit_code not in FORESEEN_CODES:
                self._view.say(f"-- the end of {self.folder.log(failure.program)}")
                for line in last_lines(self.folder.log(failure.program), LOG_LINES):
                    self._view.say(f"   {line}")
            return failure.reason, failure.exit_code
        if supervisor.done:
            ended = read_status(self.folder)
            if ended.get("ending") and not ended.get("finished"):
                return f"drained: {ended['ending']}", EXIT_DRAINED
            return "finished", EXIT_DONE
        return "interrupted", self._interrupts.exit_code


def _heldout(config: RunConfig) -> str:
    kinds = " and greedy" if config.eval.greedy else ""
    return f"{config.eval.samples:,} answers to held-out prompts, sampled{kinds}"


def _starting(states: Mapping[str, str]) -> list[str]:
    return [name for name, state in states.items() if state == "running"]


def _contradiction(summary: Mapping[str, Any]) -> str:
    """Return what is wrong with a run that seemed to end well; empty if nothing is."""
    if summary["ledger"] is None:
        return "the buffer left no final status"
    if summary["ledger"]["balance"]:
        return f"the ledger is off by {summary['ledger']['balance']} samples"
    if summary["model"] is None:
        return "the trainer left no model"
    return ""
