"""Every decision of the supervisor, with children and a clock that the test moves."""

from typing import Any

import pytest

from umbra.services.process.child import Usage
from umbra.services.process.supervisor import Failure, Program, Supervisor

PROGRAMS = (
    Program("buffer", ("buffer",), wave=2),
    Program("weight-hub", ("hub",), wave=1, recovers=True),
    Program("trainer", ("trainer",), wave=0),
    Program("generator-0", ("generator",), wave=0, elastic=True),
    Program("generator-1", ("generator",), wave=0, elastic=True),
)
KILL, TERM = -9, -15


class FakeChild:
    usage = Usage(2.0, 1.0)

    def __init__(self, name: str, log: list[str], pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self.deaf = False
        self._name, self._log = name, log

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self._log.append(f"term {self._name}")
        if not self.deaf and self.code is None:
            self.code = TERM

    def kill(self) -> None:
        self._log.append(f"kill {self._name}")
        self.code = KILL


class Stage(Supervisor):
    """A supervisor, its children by name, the newest last, and what was said and done."""

    def __init__(self) -> None:
        self.now = 0.0
        self.children: dict[str, list[FakeChild]] = {}
        self.environ: dict[str, dict[str, str]] = {}  # of the newest child
        self.log: list[str] = []
        self.said: list[str] = []
        super().__init__(
            self._make,
            goal="trainer",
            report=self.said.append,
            last_line=lambda name: f"last words of {name}",
            stop_s=15,
            clock=lambda: self.now,
        )
        for program in PROGRAMS:
            self.start(program)

    def _make(self, program: Program) -> Any:
        self.environ[program.name] = dict(program.environ)
        before = self.children.setdefault(program.name, [])
        before.append(FakeChild(program.name, self.log, pid=100 + len(before)))
        return before[-1]

    @property
    def failed(self) -> Failure:
        assert self.failure is not None
        return self.failure

    def end(self, code: int, *names: str) -> None:
        for name in names:
            self.children[name][-1].code = code

    def at(self, now: float) -> bool:
        self.now = now
        return self.poll()

    def crash_until_given_up(self, name: str) -> None:
        for _ in range(6):
            self.end(1, name)
            self.at(self.now)
            self.at(self.now + 8)

    def settle(self, now: float | None = None) -> None:
        """Poll until nothing runs; every child that is told to stop stops at once."""
        for _ in range(20):
            if not self.at(self.now if now is None else now):
                return
        pytest.fail("something still runs")


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_run_that_ends_well(stage: Stage) -> None:
    assert stage.at(1)
    stage.end(0, *stage.children)
    assert not stage.at(2)
    assert stage.done and stage.failure is None and stage.said == []
    assert stage.usage()["trainer"] == Usage(2.0, 1.0)


def test_a_generator_is_restarted_after_a_pause(stage: Stage) -> None:
    """Whose place it takes it is told."""
    assert stage.environ["generator-0"] == {}
    stage.end(KILL, "generator-0")
    assert stage.at(1)
    assert stage.said == ["generator-0 ended (killed by SIGKILL): restart 1 in 0.5 s"]
    assert stage.states()["generator-0"] == "restarts in 0.5 s"
    for now, count in ((1.4, 1), (1.5, 2)):
        stage.at(now)
        assert len(stage.children["generator-0"]) == count
    assert stage.environ["generator-0"] == {"UMBRA_REPLACES": "100"}
    assert stage.restarts() == {"generator-0": 1}
    stage.end(KILL, "generator-0")
    stage.at(2)
    assert stage.usage()["generator-0"] == Usage(4.0, 2.0)
    stage.at(6)
    assert stage.environ["generator-0"] == {"UMBRA_REPLACES": "101"}


def test_the_run_ends_with_its_last_generator(stage: Stage) -> None:
    stage.crash_until_given_up("generator-0")
    stage.crash_until_given_up("generator-1")
    assert stage.failed.program == "generator-1"
    assert stage.failed.exit_code == 6  # a traceback is our own fault
    stage.settle()
    assert not stage.done


def test_pauses_double_and_old_failures_are_forgotten(stage: Stage) -> None:
    for now, pause in ((0, 0.5), (10, 1), (20, 2), (30, 4), (40, 8), (65, 8), (300, 0.5)):
        stage.end(KILL, "generator-0")
        stage.at(now)
        stage.at(now + 9)
        assert stage.said[-1].endswith(f"in {pause:g} s"), now


@pytest.mark.parametrize("code", [2, 4])
def test_what_would_fail_again_is_not_restarted(stage: Stage, code: int) -> None:
    stage.start(Program("reward-0", ("scorer",), wave=0, elastic=True))
    stage.end(code, "generator-0", "generator-1")
    stage.at(1)
    assert stage.failed.exit_code == code
    assert stage.failed.reason.endswith(f"(exit code {code}): last words of generator-1")
    assert stage.restarts() == {}


def test_a_hub_is_restarted_but_the_run_cannot_do_without_it(stage: Stage) -> None:
    stage.end(KILL, "weight-hub")
    stage.at(1)
    stage.at(2)
    assert len(stage.children["weight-hub"]) == 2
    assert stage.failure is None
    stage.crash_until_given_up("weight-hub")
    assert stage.failed.reason.startswith("weight-hub ended again, after 5 restarts")


@pytest.mark.parametrize("name", ["buffer", "trainer"])
@pytest.mark.parametrize(("code", "exit_code"), [(3, 3), (1, 6), (KILL, 5)])
def test_the_loss_of_an_essential_process_ends_the_run(
    stage: Stage, name: str, code: int, exit_code: int
) -> None:
    stage.end(code, name)
    stage.at(1)
    assert stage.failed.reason.startswith(f"{name} ended unexpectedly (")
    assert stage.failed.reason.endswith(f": last words of {name}")
    assert stage.failed.exit_code == exit_code
    stage.settle()
    assert not stage.done


def test_a_drain_goes_wave_by_wave_and_kills_who_does_not_stop(stage: Stage) -> None:
    for name in ("trainer", "generator-1"):
        stage.children[name][-1].deaf = True
    stage.drain()
    assert set(stage.log) == {"term trainer", "term generator-0", "term generator-1"}
    stage.end(1, "trainer")
    assert stage.at(14.9) and len(stage.log) == 3
    stage.settle(15)
    assert stage.said == [
        "trainer stopped with exit code 1: last words of trainer",
        "generator-1 did not stop within 15 s: killed",
    ]
    assert stage.log[3:] == ["kill generator-1", "term weight-hub", "term buffer"]
    assert not stage.done and stage.failure is None


def test_waiting_ends_with_the_last_process_or_with_the_time(stage: Stage) -> None:
    assert not stage.wait(0)
    stage.close()
    assert stage.wait(0)
    assert stage.log == [f"kill {name}" for name in stage.children]
    assert stage.failure is None


def test_a_straggler_does_not_keep_a_finished_run(stage: Stage) -> None:
    """A trainer is waited for though the buffer has left: it may take minutes to end."""
    stage.end(0, "buffer")
    assert stage.at(1) and stage.at(600.9)
    stage.end(0, "trainer")
    assert stage.at(600.9)
    stage.end(1, "generator-0")
    assert stage.at(602)
    assert stage.said == ["generator-0 ended with exit code 1 as the run was finishing"]
    stage.end(0, "weight-hub")
    assert stage.at(630.8)
    stage.settle(631)
    assert stage.said[1:] == [
        "the run is done, but generator-1 did not leave within 30 s: stopping"
    ]
    assert len(stage.children["generator-0"]) == 1
    assert stage.done and stage.failure is None


def test_a_hub_that_leaves_early_fails_the_run(stage: Stage) -> None:
    stage.end(0, "weight-hub")
    assert stage.at(1) and stage.at(600)
    assert stage.failure is None  # it may be the end of the run
    stage.at(601)
    assert stage.failed.reason.startswith("weight-hub left before the run was done")
    assert stage.failed.exit_code == 5


def test_an_end_names_its_first_cause_and_not_the_messenger(stage: Stage) -> None:
    stage.end(6, "weight-hub")
    assert stage.at(1.0)
    stage.end(5, "trainer")
    stage.at(2.0)
    assert (stage.failed.program, stage.failed.exit_code) == ("trainer", 5)
    cause = "the first cause: weight-hub ended (exit code 6): last words of weight-hub"
    assert stage.failed.reason.endswith(cause)
