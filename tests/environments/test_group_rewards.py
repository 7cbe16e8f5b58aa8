"""Rewards that scorers give to whole groups: in all of a run, or in some of its environments."""

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

RANKED = NamedEnvironment(name="ranked", kind="reward", reward="mine:rank", reward_scope="group")
ALONE = NamedEnvironment(name="alone", kind="reward", reward="mine:score")
OWN = 0.25  # what a generator says of a sample of ALONE


def world(*environments: NamedEnvironment, **options: Any) -> World:
    """Groups of three, of which two are a batch, with scorers `x` and `y`.

    Without `environments` all are rewarded as groups; of RANKED and ALONE in turn.
    """
    how = {"environments": environments} if environments else {"reward_scope": "group"}
    fixed = {"stages": ["reward"], "lease_s": 10, "dead_after_s": 1000, "group_size": 3}
    made = World(**{**fixed, **how, **options})
    join(made)
    return made


def join(run: World) -> None:
    for role, names in (("generator", "ab"), ("scorer", "xy")):
        for name in names:
            run.join(role, name)  # type: ignore[arg-type]
    run.join("trainer", "trainer")


def answer(run: World, *tasks: Task, version: int = 0) -> None:
    """Generator `a` answers; it has rewards for samples of ALONE only."""
    for task in tasks:
        alone = task.row.get("environment") == "alone"
        given = {"reward": OWN, "reward_parts": {"score": OWN}} if alone else {"reward": 0.0}
        assert not run.submit("a", trajectory(task, version, **given)).refused


def give(run: World, tasks: list[Task], **said: Any) -> None:
    """Scores 1, 2, 3, ... for `tasks`."""
    scores = (float(number) for number, _ in enumerate(tasks, 1))
    assert run.give("x", tasks, *scores, **said).accepted == len(tasks)


def ids(tasks: list[Task]) -> list[str]:
    return [task.sample_id for task in tasks]


def test_a_group_is_scored_when_its_last_sample_is_there() -> None:
    run = world()
    tasks = run.lease("a", 100, 0)
    answer(run, *tasks[:2], *tasks[3:5])
    assert run.to_score("x") == []
    missing = StallReport(run.broker.run).missing(run.now)
    assert "stage reward waits for all of its group: waiting for sample s-2 held by a" in missing
    assert not [one for one in StallReport(run.broker.run).stuck(run.now) if "stage" in one.what]
    answer(run, tasks[2])
    given = run.to_score("x", capacity=1)  # a scorer gets one group at least
    assert ids(given) == ["s-0", "s-1", "s-2"]
    assert {task.trajectory and task.trajectory.group_id for task in given} == {"g-0"}
    answer(run, tasks[5])
    assert ids(run.to_score("y")) == ["s-3", "s-4", "s-5"]


def test_scores_of_a_group_are_taken_all_or_not_at_all() -> None:
    run = world()
    answer(run, *run.lease("a", 3, 0))
    given = run.to_score("x")
    (refused,) = run.give("x", given[:1], 1.0).refused.values()
    assert refused == "malformed: 1 scores for the 3 samples of a group"
    assert {sample.state for sample in run.pool.samples.values()} == {"scoring"}
    again = run.to_score("y")
    assert [(task.sample_id, task.attempt) for task in again] == [(f"s-{n}", 2) for n in range(3)]
    assert len(run.give("x", given, 1.0, 2.0, 3.0).refused) == 3  # too late
    run.pass_time(11)
    assert run.broker.counters["expired_leases"] == 1
    assert ids(run.to_score("x")) == ["s-0", "s-1", "s-2"]
    run.join("scorer", "x", "x-2")  # it was killed
    give(run, run.to_score("x"))
    assert [sample.reward for sample in run.pool.samples.values()] == [1.0, 2.0, 3.0]
    assert list(run.pool.complete) == ["g-0"]


def test_an_unscorable_group_fails_once_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    run = world(max_attempts=2)
    answer(run, *run.lease("a", 3, 0))
    for _ in range(2):
        run.give("x", run.to_score("x"), 0.0, 0.0, 0.0, error="raised ValueError: no")
    assert run.pool.ledger.ended == {"failed": 3}
    assert run.broker.counters["scoring_failures"] == 1
    assert "group g-0, 3 samples failed in stage reward: raised ValueError: no" in caplog.text
    # One that fails before ends a group that nobody scores.
    tasks = run.lease("a", 3, 0)
    answer(run, *tasks[:2])
    run.back("a", tasks[2], failed=True)
    assert run.to_score("x") == []
    assert run.pool.ledger.ended == {"failed": 6}
    run.broker.run.check()


def test_rewards_are_void_when_a_sample_of_the_group_is_made_anew() -> None:
    """Scenario: one of three responses is made again. Result: the others are rewarded once more."""
    run = world(batch_groups=1, run_ahead=1, max_staleness=1)
    tasks = run.lease("a", 100, 0)
    answer(run, *tasks)
    run.give("x", run.to_score("x"), *(float(n) for n in range(6)))
    run.pool.again(run.pool.samples["s-4"])
    assert [run.pool.samples[f"s-{n}"].state for n in (3, 4, 5)] == ["scoring", "queued", "scoring"]
    assert run.pool.samples["s-3"].reward == 0.0
    assert list(run.pool.complete) == ["g-0"]
    assert run.to_score("x") == []
    (task,) = run.lease("b", 1, 0)
    assert not run.submit("b", trajectory(task, 0, reward=0.0)).refused
    run.give("y", run.to_score("y"), 7.0, 8.0, 9.0)
    assert [run.pool.samples[f"s-{n}"].reward for n in (3, 4, 5)] == [7.0, 8.0, 9.0]
    run.broker.run.check()


def test_after_a_restart_groups_go_on_from_where_they_were() -> None:
    """One is being scored, one needs no scorer, one waits for its last sample."""
    run = world(RANKED, ALONE, durable=True)
    tasks = run.lease("a", 9, 0)
    answer(run, *tasks[:8])
    assert list(run.pool.complete) == ["g-1"]  # at once, though no scorer has asked
    leased = run.to_score("x")
    run.restart_broker()
    join(run)
    states = [run.pool.samples[f"s-{number}"].state for number in range(9)]
    assert states == ["scoring"] * 3 + ["ready"] * 3 + ["scoring"] * 2 + ["generating"]
    assert not run.to_score("y"), "leases outlive the buffer"
    give(run, leased, reward_parts={"rank": 1.0})
    answer(run, tasks[8])
    assert ids(run.to_score("x")) == ["s-6", "s-7", "s-8"]
    made = {one.sample_id: one for one in run.batch(1).scored()}
    assert [made[f"s-{n}"].reward for n in range(6)] == [1.0, 2.0, 3.0, OWN, OWN, OWN]
    assert [made[f"s-{n}"].reward_parts for n in (0, 3)] == [{"rank": 1.0}, {"score": OWN}]
    run.commit(1)
    run.broker.run.check()
    assert run.pool.ledger.trained == 6


def test_a_failure_in_an_evaluation_costs_a_group_only_where_groups_are_rewarded() -> None:
    """A sample that failed is worth nothing."""
    names = ["ranked", "alone", "ranked"]
    held = [Prompt(f"{n}", {"prompt": "p", "environment": name}) for n, name in enumerate(names)]
    evaluations = EvalConfig(every=1, at_ends=False, samples=6, samples_per_prompt=2, prompts="x")
    options: dict[str, Any] = {"eval_config": evaluations, "eval_prompts": held}
    run = world(RANKED, ALONE, batch_groups=2, run_ahead=0, **options)
    answer(run, *run.lease("a", 6, 0))
    give(run, run.to_score("x"))
    run.train(1)
    tasks = run.lease("a", 6, 1)
    assert [task.row["environment"] for task in tasks[::2]] == names
    assert len({task.group_id for task in tasks}) == 4
    answer(run, *tasks[:3], tasks[4], version=1)
    run.back("a", tasks[3], failed=True)
    run.back("a", tasks[5], failed=True)
    give(run, run.to_score("x"))
    (report,) = run.status.evals
    assert (report.done, report.answered, report.ended) == (True, 3, {"failed": 3})
    assert report.accuracy == (1.0 + 2.0 + OWN) / 6
    run.broker.run.check()


def test_generators_leave_the_rewards_of_groups_to_scorers() -> None:
    config = RunConfig(environments=(RANKED, ALONE), buffer=BufferConfig(stages=["reward"]))
    group, alone = unrewarded(config).environments
    assert (group.name, group.kind) == ("ranked", UNREWARDED)
    assert alone == ALONE
    one = RunConfig(environment=EnvironmentConfig(), buffer=BufferConfig(stages=["reward"]))
    assert unrewarded(one).environment.kind == UNREWARDED
    assert unrewarded(RunConfig()) == RunConfig()
    assert RunConfig().rewarded_by_scorers == ()


def test_what_cannot_work_is_refused_with_what_to_do() -> None:
    """Of one environment alone: `test_feasibility`."""
    told = 'environments.ranked.reward_scope = group .* put "reward" into buf'
    with pytest.raises(UsageError, match=told):
        check_feasible(RunConfig(environments=(RANKED, ALONE)))
    told = r"set reward_scope = group in \[\[environments\]\], or remove"
    with pytest.raises(UsageError, match=told):
        stages = BufferConfig(stages=["reward"])
        check_feasible(RunConfig(environments=(ALONE,), buffer=stages))
