"""Rewards that are given to all samples of a group at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from fakes.broker_world import World, trajectory

from umbra.proto.errors import UsageError
from umbra.proto.records import Task
from umbra.services.buffer.status import StallReport
from umbra.services.config import EvalConfig
from umbra.services.environments.protocol import SampleError, StepResult
from umbra.services.environments.rewards import RewardedGroup, RewardFunction, Rewards
from umbra.services.prompts import Prompt

ROW = {"prompt": "say", "target": "hi"}


def rank(prompts: list[Any], completions: list[str], target: list[str], **kwargs: Any) -> Any:
    assert (prompts, target) == (["say"] * len(completions), ["hi"] * len(completions))
    kwargs["log_metric"]("different", float(len(set(completions))))
    return [sum(len(other) < len(own) for other in completions) for own in completions]


def only_some(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [1.0 if own == "hi" else None for own in completions]


async def alone(prompt: Any, completion: str, row: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return float(completion == row["target"])


def rewarded(said: list[str], *functions: tuple[Any, float]) -> list[StepResult]:
    made = [RewardFunction(f, f"mine:{f.__name__}", weight) for f, weight in functions]
    environment = RewardedGroup(Rewards(made), "mine")
    environment.reset(ROW)

    async def wait() -> list[StepResult]:
        answer = environment.step_all(said)
        return await answer if isinstance(answer, Awaitable) else answer

    return asyncio.run(wait())


def test_a_function_gets_all_samples_of_a_group() -> None:
    found = rewarded(["hi", "hello", ""], (rank, 0.5))
    assert [one.reward for one in found] == [0.5, 1.0, 0.0]
    assert found[1].reward_parts == {"rank": 2.0, "different": 3.0}


def test_functions_of_one_sample_are_called_for_each() -> None:
    found = rewarded(["hi", "hello", ""], (rank, 1.0), (alone, 10.0), (only_some, 100.0))
    assert [one.reward for one in found] == [111.0, 2.0, 0.0]
    assert found[0].reward_parts["only_some"] == 1.0
    assert "only_some" not in found[1].reward_parts


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0, 2.0], "instead of a list with one number for each of 3 completions"),
        (0.5, "instead of a list with one number for each of 3 completions"),
        ([1.0, None, 1.0], "no reward function has a reward for this sample"),
        ([1.0, "2", 1.0], "'2', which is not a finite number"),
    ],
)
def test_what_is_no_reward_fails_the_group(returned: Any, says: str) -> None:
    def function(completions: list[str], **kwargs: Any) -> Any:
        return returned

    with pytest.raises(SampleError, match=says):
        rewarded(["a", "b", "c"], (function, 1.0))


def test_a_function_that_takes_no_group_is_refused() -> None:
    with pytest.raises(UsageError, match="no function with the parameter completions"):
        rewarded(["a"], (alone, 1.0))


def world(**options: Any) -> World:
    """Groups of three, of which two are a batch, with scorers `x` and `y`."""
    fixed = {"stages": ["reward"], "lease_s": 10, "dead_after_s": 1000}
    made = World(reward_scope="group", group_size=3, **{**fixed, **options})
    for name in "ab":
        made.join("generator", name)
    for name in "xy":
        made.join("scorer", name)
    made.join("trainer", "trainer")
    return made


def answer(run: World, *tasks: Task, version: int = 0) -> None:
    assert not run.submit("a", *(trajectory(task, version, reward=0.0) for task in tasks)).refused


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
    assert run.give("y", again, 1.0, 2.0, 3.0).accepted == 3
    assert [sample.reward for sample in run.pool.samples.values()] == [1.0, 2.0, 3.0]
    assert list(run.pool.complete) == ["g-0"]


def test_a_group_goes_to_another_scorer_as_a_whole() -> None:
    run = world()
    answer(run, *run.lease("a", 3, 0))
    assert len(run.to_score("x")) == 3
    run.pass_time(11)
    assert run.broker.counters["expired_leases"] == 1
    assert ids(run.to_score("y")) == ["s-0", "s-1", "s-2"]
    run.join("scorer", "y", "y-2")  # it was killed
    assert ids(run.to_score("x")) == ["s-0", "s-1", "s-2"]


def test_a_group_that_cannot_be_scored_fails_once_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = world(max_attempts=2)
    answer(run, *run.lease("a", 3, 0))
    for _ in range(2):
        run.give("x", run.to_score("x"), 0.0, 0.0, 0.0, error="raised ValueError: no")
    assert run.pool.ledger.ended == {"failed": 3}
    assert run.broker.counters["scoring_failures"] == 1
    assert "group g-0, 3 samples failed in stage reward: raised ValueError: no" in caplog.text
    run.broker.run.check()


def test_a_sample_that_fails_ends_its_group_which_nobody_scores() -> None:
    run = world()
    tasks = run.lease("a", 3, 0)
    answer(run, *tasks[:2])
    run.back("a", tasks[2], failed=True)
    assert run.to_score("x") == []
    assert run.pool.ledger.ended == {"failed": 3}


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


def test_groups_are_gathered_again_after_a_restart() -> None:
    run = world(durable=True)
    tasks = run.lease("a", 100, 0)
    answer(run, *tasks[:5])
    leased = run.to_score("x")
    assert ids(leased) == ["s-0", "s-1", "s-2"]
    run.restart_broker()
    for name in "xy":
        run.join("scorer", name)
    run.join("generator", "a")
    assert not run.to_score("y"), "leases outlive the buffer"
    assert not run.give("x", leased, 1.0, 2.0, 3.0).refused
    answer(run, tasks[5])
    assert ids(run.to_score("x")) == ["s-3", "s-4", "s-5"]


def test_all_samples_of_a_prompt_are_rewarded_at_once_in_evaluations() -> None:
    prompts = [Prompt(str(n), {"prompt": f"held out {n}"}) for n in range(2)]
    config = EvalConfig(every=1, at_ends=False, samples=4, samples_per_prompt=2, prompts="x")
    run = world(batch_groups=1, eval_config=config, eval_prompts=prompts)
    answer(run, *run.lease("a", 3, 0))
    run.give("x", run.to_score("x"), 1.0, 2.0, 3.0)
    assert run.batch(1).trajectories
    run.commit(1)
    tasks = run.lease("a", 4, 1)
    assert [task.row["prompt"][-1] for task in tasks] == ["0", "0", "1", "1"]
    answer(run, *tasks[:3], version=1)
    run.give("x", run.to_score("x"), 1.0, 0.0)
    run.back("a", tasks[3], failed=True)
    (report,) = run.status.evals
    assert (report.done, report.answered, report.ended) == (True, 2, {"failed": 2})
    assert report.accuracy == 0.25  # what failed is worth nothing
    run.broker.run.check()
