"""A whole run on this machine: the supervised loop, and its summary.

Its processes start in the order of `Up._start`, and stop in waves.
"""

from __future__ import annotations

import math
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from umbra.deploy.prepare.stage import FORESEEN_CODES, StageInterrupted, Stages
from umbra.deploy.report import summarise, write_report, write_summary
from umbra.deploy.run.live import Progress, View
from umbra.deploy.run_folder import RunFolder, StepFollower, read_object, tail
from umbra.deploy.shown import shown_path
from umbra.proto.deadline import Deadline
from umbra.proto.errors import EXIT_DONE, StartupError, UmbraError
from umbra.proto.net.keys import open_security
from umbra.services.config import RunConfig
from umbra.services.monitor.run_address import RunAddress
from umbra.services.process.child import ChildError, ChildProcess, child_environ, umbra_argv
from umbra.services.process.command import SignalCounter
from umbra.services.process.fork_server import ForkServer
from umbra.services.process.supervisor import Program, Supervisor
from umbra.services.weights.arena import remove_leftovers

POLL_S, IDLE_POLL_S = 0.05, 0.25
HELP_S = 60.0  # for somebody to help a run that can't go on; it is then ended, and can be resumed
START_S = 600.0  # for the buffer to bind: a store is opened, prompts are read, on any machine
LOG_LINES = 15
TRAINER_RESTARTS = 3  # each repeats the steps since its last checkpoint
BUFFER, HUB, TRAINER = "buffer", "weight-hub", "trainer"
EXIT_DRAINED = 128 + signal.SIGTERM  # `umbra drain` is as if it had got this signal


@dataclass
class Up:
    """One run in its folder."""

    config: RunConfig  # resolved, with absolute paths
    folder: RunFolder
    view: View
    interrupts: SignalCounter
    search: Sequence[Path] = ()  # where the user's modules are looked for
    server: ForkServer | None = None  # forks the processes that need PyTorch
    started: float = field(default_factory=time.monotonic)  # since when the user waits
    # Whether a model that is being made is there: until then no process starts that loads it.
    model_made: Callable[[], bool] | None = None
    stand_in: str = ""  # a directory to be tried, which differs from the model's in weights alone

    def __post_init__(self) -> None:
        environ = child_environ(self.search)
        self._stages = Stages(self.folder, environ, self.interrupts, self.server)
        self._outcome: dict[str, Any] = {}
        self._trained = False  # a step in this life of the run

    def run(self) -> dict[str, Any]:
        """Run to the end, good or bad; return the summary, which is also in the folder.

        UsageError says that the configuration cannot work, and nothing was started; ChildError that
        a service refuses to continue this run: its folder is as it was before, but for its logs.
        """
        before = self.folder.remember() if self.folder.config.is_file() else None
        try:
            self.folder.write_origin(self.search)
            self.view.say("trying environment and model on the first prompt ...")
            for warning in self._stages.try_environment(self.config, stand_in=self.stand_in):
                self.view.say(f"warning: {warning}")
        except (UmbraError, StageInterrupted) as error:
            if before is not None:
                self.folder.put_back(before)
            else:
                self.folder.discard()
            if isinstance(error, UmbraError):
                raise
            sentence = "interrupted before anything was started"
            raise ChildError(sentence, self.interrupts.exit_code) from error
        try:
            remove_leftovers(self.folder.id)  # of a life of this run that was killed
            self.folder.forget_end()
            reason, code = self._supervise()
        except UmbraError as error:
            reason, code = str(error), error.exit_code
        if before is not None and code in FORESEEN_CODES and not self._trained:
            self.folder.put_back(before)
            raise ChildError(reason, code)
        if self.model_made is not None:
            self.folder.discard()  # nobody can go on without a model
        if not self.folder.config.is_file():
            raise ChildError(reason, code)
        total_s = time.monotonic() - self.started
        summary = summarise(self.folder, reason, code, total_s, **self._outcome)
        if code == EXIT_DONE and (bad := _contradiction(summary)):
            summary["exit_reason"], summary["exit_code"] = bad, UmbraError.exit_code
        try:
            write_summary(self.folder, summary)
            if self.folder.metrics.exists():
                write_report(self.folder)
        except OSError as error:
            self.view.say(f"no summary or no report was written: {error.strerror}")
        return summary

    def _supervise(self) -> tuple[str, int]:
        last_line = self._stages.last_line
        supervisor = Supervisor(
            self._spawn, goal=TRAINER, report=self.view.say, last_line=last_line
        )
        progress, steps = Progress(), StepFollower(self.folder.metrics)
        steps.new()  # of earlier lives
        try:
            self._start(supervisor, progress)
            while supervisor.poll():
                if not self.folder.config.is_file():
                    raise UmbraError(
                        f"{self.folder.path} was removed under way, and what the run has learned "
                        "with it: all processes were stopped"
                    )
                self._turn(supervisor, progress)
                for stuck in progress.status.stuck if progress.status is not None else ():
                    if stuck.hopeless and stuck.age_s > HELP_S:
                        raise UmbraError(
                            f"{stuck.hopeless} for {stuck.age_s:.0f} s; after that is mended, "
                            f"resume with `umbra up {shown_path(self.folder.path)}`"
                        )
        finally:
            self._trained = bool(steps.new())
            self.view.update(progress)
            progress.close()
            supervisor.close()
            RunAddress.forget(self.folder.path)
            remove_leftovers(self.folder.id)
        self._outcome |= {"usage": supervisor.usage(), "restarts": supervisor.restarts()}
        return self._verdict(supervisor)

    def _spawn(self, program: Program) -> ChildProcess:
        log, environ = self.folder.log(program.name), {**self._stages.environ, **program.environ}
        server = self.server if program.forked else None
        return ChildProcess(program.argv, environ=environ, stdout=log, stderr=log, server=server)

    def _start(self, supervisor: Supervisor, progress: Progress) -> None:
        """Start the buffer, and the others once it has said where it is."""
        self.view.say("starting ...")
        # With a durable store the buffer can be started again: it goes on at the same address.
        durable, argv = self.config.buffer.store != "memory", _argv(BUFFER, BUFFER, self.folder)
        supervisor.start(Program(BUFFER, argv, wave=2, recovers=durable))
        deadline = Deadline(START_S, "the buffer was not up", error=StartupError)
        while (facts := supervisor.ready(BUFFER)) is None:
            if not supervisor.poll() or supervisor.draining:
                return
            deadline.check()
            self._turn(supervisor, progress)
        broker = str(facts["broker"])
        progress.watch(broker, open_security(self.config.security.keys, ["monitor"]))
        RunAddress(broker, self.config.security.keys).write(self.folder.path)
        self.view.say(f"run {self.folder.id}, its buffer at {broker}")
        self.view.say(f"to watch it: umbra monitor {shlex.quote(shown_path(self.folder.path))}")
        hub, *others = other_programs(self.config, self.folder, broker)
        supervisor.start(hub)
        while self.model_made or (self.server is not None and not self.server.ready()):
            if not supervisor.poll() or supervisor.draining:
                return
            self._turn(supervisor, progress)
        for program in others:
            supervisor.start(program)

    def _turn(self, supervisor: Supervisor, progress: Progress) -> None:
        """Run one turn of the loop: heed signals, show progress, sleep a little."""
        if self.interrupts.count >= 2:
            supervisor.kill()
        elif self.interrupts.count == 1 and not supervisor.draining:
            self.view.say("stopping; once more to end at once")
            supervisor.drain()
        if self.model_made is not None and self.model_made():
            self.model_made = None
        if self.model_made is None:
            self.view.update(progress)
        idle = progress.idle and self.model_made is None
        self.interrupts.wait(IDLE_POLL_S if idle else POLL_S)

    def _verdict(self, supervisor: Supervisor) -> tuple[str, int]:
        if (failure := supervisor.failure) is not None:
            if failure.exit_code not in FORESEEN_CODES:
                log = self.folder.log(failure.program)
                for line in (f"-- the end of {log}", *(f"   {t}" for t in tail(log)[-LOG_LINES:])):
                    self.view.say(line)
            return failure.reason, failure.exit_code
        if supervisor.done:
            status = read_object(self.folder.buffer)
            if status.get("ending") and not status.get("finished"):
                return f"drained: {status['ending']}", EXIT_DRAINED
            return "finished", EXIT_DONE
        return "interrupted", self.interrupts.exit_code


def _contradiction(summary: Mapping[str, Any]) -> str:
    """Return the fault of a run that seemed to end well; empty if there is none."""
    if (ledger := summary["ledger"]) is None:
        return "the buffer left no final status"
    if ledger["balance"]:
        return f"the ledger is off by {ledger['balance']} samples"
    return "" if summary["model"] else "the trainer left no model"


def other_programs(config: RunConfig, folder: RunFolder, broker: str) -> list[Program]:
    """Return all programs but the buffer, which are told its address."""
    generator, connect = config.generator, ("--broker", broker)
    repeats = config.buffer.store != "memory"  # steps
    hub, trainer = (_argv(name, name, folder, *connect) for name in (HUB, TRAINER))
    limits: dict[str, Any] = {"restarts": TRAINER_RESTARTS, "window_s": math.inf}
    programs = [
        Program(HUB, hub, wave=1, recovers=True),
        Program(TRAINER, trainer, wave=0, recovers=repeats, forked=True, **limits),
    ]

    def add(command: str, name: str, *more: str, forked: bool = True) -> None:
        argv = _argv(command, name, folder, *connect, *more)
        programs.append(Program(name, argv, wave=0, elastic=True, forked=forked))

    kind, _, first = generator.device.partition(":")
    for index in range(generator.count):  # with device cuda:N each gets GPUs of its own, from N
        own = f"{kind}:{int(first) + index * generator.tensor_parallel}" if first and index else ""
        more = ("--set", f"generator.device={own}") if own else ()
        # vLLM settles much while it is imported.
        add("generator", f"generator-{index}", *more, forked=generator.engine != "vllm")
    for stage in config.buffer.stages:
        for index in range(config.scorer.processes(stage)):
            add("scorer", f"{stage.replace('_', '-')}-{index}", "--stage", stage)
    return programs


def _argv(command: str, name: str, folder: RunFolder, *more: str) -> tuple[str, ...]:
    common = ("--config", str(folder.config), "--name", name, "--run-dir", str(folder.path))
    return umbra_argv(command, *common, *more)
