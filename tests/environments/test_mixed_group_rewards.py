"""Several environments of which some reward whole groups: who is rewarded where."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.broker_world import World, trajectory

from umbra.proto.errors import UsageError
from umbra.proto.records import Task
from umbra.services.buffer.status import StallReport
from umbra.services.config import (
    BufferConfig,
    EnvironmentConfig,
    EvalConfig,
    NamedEnvironment,
    RunConfig,
)
from umbra.services.config.rules import check_feasible
from umbra.services.environments.loading import UNREWARDED
from umbra.services.generator.service import unrewarded
from umbra.services.prompts import Prompt

RANKED = NamedEnvironment(
    name="ranked", kind="reward", reward="mine:rank", reward_scope="group", python="/x/python"
)
ALONE = NamedEnvironment(name="alone", kind="reward", reward="mine:score")
OWN = 0.25  # what a generator says of a sample of ALONE


def world(**options: Any) -> World:
    """Groups of three: g-0 and g-2 of RANKED, g-1 and g-3 of ALONE. Two are a batch."""
    fixed = {"stages": ["reward"], "lease_s": 1000, "dead_after_s": 1000, "group_size": 3}
    made = World(environments=(RANKED, ALONE), **{**fixed, **options})
    for name in "ab":
        made.join("generator", name)
    made.join("scorer", "x")
    made.join("trainer", "trainer")
    return made


def answer(run: World, *tasks: Task, version: int = 0) -> None:
    """Generator `a` answers; it has rewards for samples of ALONE only."""
    for task in tasks:
        alone = task.row["environment"] == "alone"
        given = {"reward": OWN, "reward_parts": {"score": OWN}} if alone else {"reward": 0.0}
        assert not run.submit("a", trajectory(task, version, **given)).refused


def give(run: World, tasks: list[Task], **said: Any) -> None:
    """Scores 1, 2, 3, ... for `tasks`."""
    scores = (float(number) for number, _ in enumerate(tasks, 1))
    assert run.give("x", tasks, *scores, **said).accepted == len(tasks)


def ids(tasks: list[Task]) -> list[str]:
    return [task.sample_id for task in tasks]


def states(run: World, *numbers: int) -> list[str]:
    return [run.pool.samples[f"s-{number}"].state for number in numbers]


def test_only_groups_of_environments_that_ask_for_it_go_to_scorers() -> None:
    run = world()
    tasks = run.lease("a", 6, 0)
    answer(run, *tasks[3:], *tasks[:2])
    assert list(run.pool.complete) == ["g-1"]  # at once, though no scorer has asked
    assert run.to_score("x") == []
    missing = StallReport(run.broker.run).missing(run.now)
    assert "stage reward waits for all of its group: waiting for sample s-2" in missing
    answer(run, tasks[2])
    given = run.to_score("x")
    assert ids(given) == ["s-0", "s-1", "s-2"]
    give(run, given, reward_parts={"rank": 1.0})
    made = {one.sample_id: one for one in run.batch(1).scored()}
    assert [made[f"s-{n}"].reward for n in range(6)] == [1.0, 2.0, 3.0, OWN, OWN, OWN]
    assert [made[f"s-{n}"].reward_parts for n in (0, 3)] == [{"rank": 1.0}, {"score": OWN}]
    assert run.broker.counters["scored: reward"] == 3
    run.commit(1)
    run.broker.run.check()
    assert run.pool.ledger.trained == 6


def test_what_passed_the_stage_is_ready_after_a_restart() -> None:
    run = world(durable=True)
    tasks = run.lease("a", 6, 0)
    answer(run, *tasks)
    run.restart_broker()
    for role, name in (("scorer", "x"), ("generator", "a"), ("trainer", "trainer")):
        run.join(role, name)  # type: ignore[arg-type]
    assert states(run, *range(6)) == ["scoring"] * 3 + ["ready"] * 3
    give(run, run.to_score("x"))
    rewards = {one.sample_id: one.reward for one in run.batch(1).scored()}
    assert rewards == {"s-0": 1.0, "s-1": 2.0, "s-2": 3.0, "s-3": OWN, "s-4": OWN, "s-5": OWN}


def test_a_run_goes_on_with_the_environments_that_left_rewards_to_scorers() -> None:
    run = world(durable=True)
    answer(run, *run.lease("a", 6, 0))
    run.config = RunConfig(
        run=run.config.run, buffer=run.config.buffer, environments=(ALONE, *others("ranked"))
    )
    with pytest.raises(UsageError, match=r"reward_scope group = \['ranked'\], this one has \["):
        run.restart_broker()


def others(name: str) -> tuple[NamedEnvironment, NamedEnvironment]:
    return (
        NamedEnvironment(name=name, kind="reward", reward="mine:score"),
        NamedEnvironment(name="more", kind="reward", reward="mine:rank", reward_scope="group"),
    )


def test_a_failure_in_an_evaluation_costs_a_group_only_where_groups_are_rewarded() -> None:
    prompts = [Prompt(str(n), {"prompt": "p", "environment": n}) for n in ("ranked", "alone")]
    config = EvalConfig(every=1, at_ends=False, samples=4, samples_per_prompt=2, prompts="x")
    run = world(batch_groups=2, run_ahead=0, eval_config=config, eval_prompts=prompts)
    answer(run, *run.lease("a", 6, 0))
    give(run, run.to_score("x"))
    assert run.batch(1).trajectories
    run.commit(1)
    tasks = run.lease("a", 4, 1)
    assert [task.row["environment"] for task in tasks] == ["ranked"] * 2 + ["alone"] * 2
    assert len({task.group_id for task in tasks}) == 3
    answer(run, *tasks[:3], version=1)
    run.back("a", tasks[3], failed=True)
    give(run, run.to_score("x"))
    (report,) = run.status.evals
    assert (report.done, report.answered, report.ended) == (True, 3, {"failed": 1})
    assert report.accuracy == (1.0 + 2.0 + OWN) / 4
    run.broker.run.check()


def mixed(*environments: NamedEnvironment, stages: Any = ("reward",), **buffer: Any) -> RunConfig:
    return RunConfig(
        environments=environments or (RANKED, ALONE),
        buffer=BufferConfig(stages=list(stages), **buffer),
    )


def test_generators_leave_the_rewards_of_groups_to_scorers() -> None:
    config = mixed()
    ranked, alone = unrewarded(config).environments
    assert (ranked.name, ranked.kind, ranked.python) == ("ranked", UNREWARDED, "")
    assert alone == ALONE
    one = RunConfig(environment=EnvironmentConfig(), buffer=BufferConfig(stages=["reward"]))
    assert unrewarded(one).environment.kind == UNREWARDED
    assert unrewarded(RunConfig()) == RunConfig()
    assert RunConfig().rewarded_by_scorers == ()


@pytest.mark.parametrize(
    ("run", "to_change"),
    [
        (mixed(stages=()), 'environments.ranked.reward_scope = group .* put "reward" into buffer'),
        (
            mixed(ALONE),
            r"stages has reward: set reward_scope = group in \[\[environments\]\], or remove",
        ),
        (mixed(group_size=1), "environments.ranked.* buffer.group_size = 1 must be from 2 to 512"),
        (mixed(straggler_s=5.0), "waits for all samples of a group: set buffer.straggler_s to 0"),
        (
            mixed(NamedEnvironment(name="one", kind="exact", reward_scope="group")),
            "reward_scope = group has no effect with kind exact: set environments.one.kind to",
        ),
        (
            mixed(NamedEnvironment(name="one", kind="trl", id="m:C", reward_scope="group")),
            "reward_scope = group has no effect with kind trl, whose objects.* set "
            "environments.one.kind to reward",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(run: RunConfig, to_change: str) -> None:
    with pytest.raises(UsageError, match=to_change):
        check_feasible(run)
