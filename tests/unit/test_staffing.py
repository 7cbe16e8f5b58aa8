"""How many generators a run on CPUs has: decided by samples/s with and without another one."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import looks

from umbra.deploy.staffing import Foreman, IdleCores, Observation, Staffing, look_at
from umbra.services.process.supervisor import Program

STARVED = Observation(
    trained=0, steps=0, generators=1, waits=0.6, busy=0.95, idle_cores=2.0, room=True
)


class Run:
    """A run whose rate depends on how many generators it has."""

    def __init__(self, rates: dict[int, float], seen: Observation = STARVED) -> None:
        self.staffing = Staffing(period_s=20, steps=4, rest_s=120)
        self.now = 0.0
        self.wanted = [1]
        self._rates = rates
        self._seen = seen

    def go_on(self, seconds: int) -> list[int]:
        """The numbers of generators wanted so far, each once."""
        for _ in range(seconds):
            self.now += 1
            trained = self._seen.trained + self._rates[self.wanted[-1]]
            steps = self._seen.steps + 1
            generators = self.wanted[-1]
            self._seen = replace(self._seen, trained=trained, steps=steps, generators=generators)
            if (wanted := self.staffing.look(self.now, self._seen)) != self.wanted[-1]:
                self.wanted.append(wanted)
        return self.wanted


def test_one_more_while_each_brings_something() -> None:
    run = Run({1: 100, 2: 190, 3: 280, 4: 285})
    assert run.go_on(300) == [1, 2, 3, 4, 3]


def test_what_brought_nothing_is_tried_again_later_and_ever_less_often() -> None:
    run = Run({1: 100, 2: 104})
    run.go_on(90)
    assert run.wanted == [1, 2, 1]
    assert run.go_on(110) == [1, 2, 1]
    assert run.go_on(100) == [1, 2, 1, 2, 1]
    assert run.go_on(180) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    "seen",
    [
        replace(STARVED, waits=0.05),
        replace(STARVED, busy=0.5),
        replace(STARVED, idle_cores=0.2),
        replace(STARVED, room=False),
    ],
    ids=["the trainer is busy", "work is scarce", "cores are busy", "memory is full"],
)
def test_none_is_tried_where_it_would_not_help(seen: Observation) -> None:
    assert Run({1: 100}, seen).go_on(300) == [1]


def test_nothing_is_judged_over_less_than_some_steps() -> None:
    staffing = Staffing(period_s=20, steps=4)
    for now in range(1000):
        assert staffing.look(float(now), replace(STARVED, steps=now // 500)) == 1


def test_nothing_is_judged_while_one_is_missing() -> None:
    """A generator that is on its way, or that has died and is started again."""
    run = Run({1: 100, 2: 190})
    run.go_on(45)
    assert run.wanted == [1, 2]
    late = replace(STARVED, steps=1000, trained=100_000)
    for now in range(200):
        assert run.staffing.look(run.now + now, replace(late, steps=1000 + now)) == 2
    assert run.staffing.on_trial


def test_what_is_seen_of_a_status() -> None:
    members = [
        looks.member(
            "trainer", role="trainer", shares={"wait_batch": 0.3, "train": 0.6, "wait_hub": 0.1}
        ),
        looks.member("generator-0", shares={"decode": 1.0}),
        looks.member("generator-1", shares={"decode": 0.5, "idle: work": 0.5}),
    ]
    seen = look_at(looks.status(members=members, version=7), 1.5)
    assert (seen.steps, seen.generators, seen.idle_cores) == (7, 2, 1.5)
    assert (seen.waits, seen.busy, seen.room) == (pytest.approx(0.3), 0.75, True)


def test_the_foreman_starts_and_ends_what_is_wanted() -> None:
    said: list[str] = []
    there = ["generator-0"]
    wanted = iter([1, 2, 2, 1, 1])

    class Told(Staffing):
        def look(self, now: float, seen: Observation) -> int:
            self.wanted = next(wanted)
            return self.wanted

    foreman = Foreman(
        lambda index: Program(f"generator-{index}", (), wave=0),
        start=lambda program: there.append(program.name),
        retire=there.remove,
        say=said.append,
        staffing=Told(),
    )
    kept: list[list[str]] = []
    for version in range(5):
        status = looks.status(version=version)
        foreman.turn(status)
        foreman.turn(status)  # seen already
        kept.append(list(there))
    one, two = ["generator-0"], ["generator-0", "generator-1"]
    assert kept == [one, two, two, one, one]
    assert said == [
        "the trainer waits and cores are idle: generator 2 is tried",
        "generator 2 brought nothing and leaves",
    ]


def test_idle_cores_of_those_that_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = tmp_path / "stat"
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 11}, raising=False)
    monkeypatch.setattr("os.sysconf", lambda _name: 100)
    now = [0.0]

    def tell(idle_0: int, idle_1: int, idle_11: int) -> None:
        times.write_text(
            f"cpu  9 9 9 999 9\ncpu0 1 2 3 {idle_0} 0 7\ncpu1 1 2 3 {idle_1} 0\n"
            f"cpu11 1 2 3 {idle_11} 50 0\nintr 4\n",
            encoding="ascii",
        )

    tell(0, 0, 0)
    cores = IdleCores(lambda: now[0], times)
    now[0] = 2.0
    tell(100, 200, 150)
    assert cores() == pytest.approx(1.25)  # 1 s of core 0 and 1.5 s of core 11, in 2 s
    assert cores() == pytest.approx(1.25)
    assert IdleCores(lambda: now[0], tmp_path / "none")() == 0.0
