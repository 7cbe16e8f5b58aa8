"""Evaluations within a run: pinned to one version, first in line, never lost."""

from typing import Any

import pytest
from fakes.broker_world import World, trajectory, world
from msgspec.structs import replace

from umbra.proto.messages import FinishRun, Leave, Nack, RunFinished
from umbra.proto.records import EvalReport, Ledger, Task
from umbra.services.buffer.store import StoreError
from umbra.services.config import EvalConfig
from umbra.services.prompts import Prompt

SAMPLES = 3
PROMPTS = [Prompt(str(n), {"prompt": f"held out {n}"}) for n in range(2)]


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvalConfig, "timeout_s", 50.0)


def begun(config: EvalConfig, **options: Any) -> World:
    fixed = {"dead_after_s": 1000, "lease_s": 1000, **options}
    return world(eval_config=config, eval_prompts=PROMPTS, durable=True, **fixed)


def evaluated(mode: Any, **options: Any) -> World:
    """Version 2 is reached, whose evaluation of three samples is due."""
    config = EvalConfig(every=2, at_ends=False, mode=mode, samples=SAMPLES, prompts="x")
    run = begun(config, **options)
    run.steps("a", 1, 2)
    return run


def check_done(run: World, version: int) -> None:
    """The evaluation of `version` ends with what `a` answers now: no sample is missing."""
    tasks = pinned(run.lease("a", 9, version))
    assert all(task.trajectory is None for task in tasks), "tokens of other weights are continued"
    run.answer("a", tasks, version)
    found = report(run)
    assert (found.version, found.done, found.answered) == (version, True, SAMPLES)


def report(run: World) -> EvalReport:
    return run.status.evals[-1]


def ledger_of(run: World) -> Ledger:
    return run.broker.run.evals.pool.ledger.snapshot()


def pinned(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if task.pinned_version >= 0]


def test_training_pauses_for_an_evaluation() -> None:
    run = evaluated("pause")
    assert run.lease("a", 9, 1) == []  # serves another version
    tasks = run.lease("a", 9, 2)
    assert [(t.pinned_version, t.row["prompt"]) for t in tasks] == [
        (2, "held out 0"), (2, "held out 1"), (2, "held out 0"),
    ]  # fmt: skip
    reply = run.batch(3)
    assert not reply.trajectories and "evaluation" in reply.waiting_for
    before = run.pool.ledger.issued
    run.answer("a", tasks, 2, 1.0, 0.0)
    (found,) = run.status.evals
    assert (found.version, found.done, found.answered) == (2, True, SAMPLES)
    assert found.accuracy == pytest.approx(2 / 3)
    assert run.pool.ledger.issued == before  # a ledger of their own
    assert ledger_of(run).ended == {"evaluated": SAMPLES}
    assert run.lease("a", 9, 2)
    assert [row.fields["version"] for row in run.rows if row.kind == "eval"] == [2]


@pytest.mark.parametrize("mode", ["pause", "concurrent"])
def test_an_evaluation_goes_on_when_the_buffer_starts_again(mode: str) -> None:
    """One sample is answered, one is held, one waits; nothing of that is lost or done twice."""
    run = evaluated(mode)
    first, second = run.lease("a", 2, 2)
    run.answer("a", [first], 2)
    run.back("a", second, failed=True)
    assert run.broker.run.counters["environment_failures"] == 1
    before, ledger = report(run), ledger_of(run)
    assert (before.answered, before.ended) == (1, {"failed": 1})
    run.restart_broker()
    assert report(run) == before
    assert ledger_of(run) == ledger
    (third,) = pinned(run.lease("a", 1, 2))
    run.restart_broker()
    run.answer("a", [third], 2)  # its lease has outlived the buffer
    assert (report(run).done, report(run).answered) == (True, 2)
    assert ledger_of(run).balance == 0
    assert not run.store.keys("t/e") and not run.store.keys("g/e")
    run.restart_broker()
    assert [one.done for one in run.status.evals] == [True]


def test_an_evaluation_of_other_samples_begins_again() -> None:
    """A run that was stopped because it takes too long is resumed with fewer, or with none."""
    for prompts, size in ((PROMPTS, 2), ((), 0)):
        run = evaluated("pause")
        run.answer("a", run.lease("a", 1, 2), 2)
        run.config = replace(run.config, eval=replace(run.config.eval, samples=2))
        run.eval_prompts = prompts
        run.restart_broker()
        assert len(pinned(run.lease("a", 9, 2))) == size
        assert (ledger_of(run).ended, ledger_of(run).balance) == ({"cancelled": SAMPLES}, 0)


def test_a_store_without_samples_of_its_evaluation_is_refused() -> None:
    run = evaluated("pause")
    for key in (*run.store.keys("g/e"), *run.store.keys("r/e")):
        run.store.delete(key)
    with pytest.raises(StoreError, match=f"{SAMPLES} samples are unaccounted for"):
        run.restart_broker()


def test_an_evaluation_that_takes_long_names_its_holders_and_then_ends_as_overdue() -> None:
    run = evaluated("pause", stall_s=20.0)
    run.lease("a", 2, 2)
    run.now += 20.0
    assert not [one for one in run.status.stuck if "evaluation" in one.what]
    run.now += 1.0
    (found,) = [one for one in run.status.stuck if "evaluation" in one.what]
    assert found.what == f"evaluation of version 2: {SAMPLES} samples are missing"
    assert (found.holder, found.age_s) == ("a", 21.0)
    assert found.action == "the rest ends as overdue in 29 s"
    run.pass_time(28)
    assert not report(run).ended
    run.pass_time(1)
    assert report(run).ended == {"overdue": SAMPLES}


def test_an_evaluation_is_pinned_to_the_first_version_that_is_served() -> None:
    """No generator happens to load the version that is due; training goes on beside it."""
    run = evaluated("concurrent")
    assert not pinned(run.produce("b", 1, 4))
    run.produce("a", 1)
    run.train(3)
    tasks = pinned(run.lease("a", 1, 3))
    assert not pinned(run.produce("b", 2))
    refused = run.submit("a", trajectory(tasks[0], 2, 3)).refused
    assert "of another version" in refused[tasks[0].sample_id]
    run.train(4)
    assert not pinned(run.lease("b", 9, 4))  # newer weights than those it is pinned to
    check_done(run, 3)


def test_an_evaluation_that_nobody_can_finish_begins_again_with_newer_weights() -> None:
    """The generator that kept the version dies; the other serves a newer one already."""
    run = evaluated("concurrent")
    first, second = run.lease("a", 2, 2)
    run.answer("a", [first], 2)
    run.back("a", second, partial=trajectory(second, 2, finish_reason="partial"))
    run.produce("b", 1)
    run.train(3)
    run.lease("b", 1, 3)
    run.ask("a", Leave(reason="silent"))
    run.join("generator", "a")
    assert run.lease("a", 0, 3) == []
    run.pass_time(0.1)
    assert run.broker.counters["evaluations_begun_again"] == 1
    assert report(run).answered == 0
    assert run.submit("a", trajectory(second, 2)).refused, "late, and of the version before"
    run.restart_broker()
    check_done(run, 3)
    ledger = ledger_of(run)
    assert (ledger.ended, ledger.balance) == ({"evaluated": SAMPLES}, 0)


def test_an_evaluation_is_scored_by_the_reward_stage_alone() -> None:
    options: dict[str, Any] = {
        "eval_config": EvalConfig(every=1, at_ends=False, samples=1, prompts="x"),
        "eval_prompts": PROMPTS[:1], "durable": True, "batch_groups": 1, "group_size": 1,
    }  # fmt: skip
    assert not world(stages=["ref_logp"], **options).broker.run.evals.pool.unscored
    run = world(stages=["reward"], **options)
    run.join("scorer", "r")
    run.answer("a", run.lease("a", 1, 0), 0)
    run.give("r", run.to_score("r"), 0.5)
    run.train(1)
    run.answer("a", pinned(run.lease("a", 1, 1)), 1)
    run.restart_broker()  # while it waits for its reward
    run.give("r", run.to_score("r"), 0.5)
    assert (report(run).done, report(run).accuracy) == (True, 1.5)


def test_a_run_ends_after_its_evaluation_even_if_the_buffer_starts_again() -> None:
    run = evaluated("concurrent", steps=2)
    assert run.ask("trainer", FinishRun(reason="x")) is None
    tasks = run.lease("a", 9, 2)
    run.restart_broker()
    assert run.ask("trainer", FinishRun(reason="x")) is None  # sent again
    run.join("trainer", "trainer", "trainer-2")
    (refused,) = run.late.pop("trainer")
    assert isinstance(refused, Nack) and refused.code == "not_member"
    run.answer("a", tasks, 2)
    assert report(run).done and run.broker.run.state == "ready", "the trainer is to come back"
    assert run.get("trainer", FinishRun(reason="x"), RunFinished).ledger.balance == 0


def test_a_run_that_is_drained_in_its_last_evaluation_goes_on_with_it() -> None:
    run = evaluated("concurrent", steps=2)
    run.lease("a", 1, 2)
    run.take(run.broker.drain("enough", run.now))
    assert run.ask("trainer", FinishRun(reason="x")) is None
    run.restart_broker()
    run.join("generator", "a", "a-2")
    check_done(run, 2)


@pytest.mark.parametrize(("at_ends", "evaluated_at"), [(True, [2, 3]), (False, [2])])
def test_the_last_version_is_always_evaluated(at_ends: bool, evaluated_at: list[int]) -> None:
    run = begun(EvalConfig(every=2, at_ends=at_ends, mode="pause", samples=2, prompts="x"), steps=3)
    for step in (1, 2, 3):
        while not run.batch(step).trajectories:
            run.produce("a", step - 1)
        run.commit(step)
    run.produce("a", 3)
    assert [one.version for one in run.status.evals if one.version] == evaluated_at


def test_an_open_evaluation_is_cancelled_with_the_buffer_or_with_its_version() -> None:
    """The trainer may start again before it: version and evaluation come once more."""
    runs = [evaluated("concurrent") for _ in range(2)]
    for run in runs:
        run.answer("a", run.lease("a", 1, 2), 2)
        assert not report(run).done
    ended, run = runs
    ended.take(ended.broker.close(ended.now))
    last = report(ended)
    assert (last.answered, last.ended) == (1, {"cancelled": SAMPLES - 1}), "and none is restarted"
    run.join("trainer", "trainer", "trainer-2")
    run.batch(1)
    assert not run.broker.run.evals.pool.groups
    for one in runs:
        ledger = ledger_of(one)
        assert (ledger.ended, ledger.balance) == ({"cancelled": SAMPLES}, 0)
    for number in (1, 2):
        run.train(number)
    check_done(run, 2)


@pytest.mark.parametrize("mode", ["pause", "concurrent"])
def test_the_weights_of_the_beginning_are_evaluated_first(mode: Any) -> None:
    """It begins when a generator asks for work, not when the buffer starts."""
    run = begun(EvalConfig(mode=mode, samples=2, prompts="x"))
    run.pass_time(200)
    assert not run.status.evals
    tasks = run.lease("a", 9, 0)
    assert [task.pinned_version for task in tasks[:2]] == [0, 0]
    assert len(tasks) == (2 if mode == "pause" else 9), "and training samples beside them"
    assert not run.batch(1).evals
    run.answer("a", pinned(tasks), 0, 1.0, 0.0)
    (told,) = run.batch(1).evals
    assert (told.version, told.done, told.accuracy) == (0, True, 0.5)
    run.restart_broker()
    assert run.batch(1).evals == [told]
    assert not pinned(run.lease("a", 9, 0)), "once"


def test_several_answers_to_each_prompt() -> None:
    """Of four each: 3 solve the first prompt; of the second one solves, one failed, two are wrong.
    1 - C(n - c, k) / C(n, k) by hand."""
    run = begun(EvalConfig(mode="pause", samples=8, samples_per_prompt=4, prompts="x"))
    tasks = run.lease("a", 8, 0)
    assert [task.prompt_id for task in tasks] == ["0"] * 4 + ["1"] * 4
    run.back("a", tasks[7], failed=True)
    run.restart_broker()
    run.answer("a", tasks[:4], 0, 1.0, 1.0, 0.5, 1.0)
    assert set(report(run).scores) == {"pass@1", "pass@2", "pass@4", "mean@4"}, "as far as it is"
    run.answer("a", tasks[4:7], 0, 0.0, 1.0, 0.0)
    expected = {
        "pass@1": (3 / 4 + 1 / 4) / 2,
        "pass@2": (1 + (1 - 3 / 6)) / 2,
        "pass@4": 1.0,
        "mean@4": (3.5 / 4 + 1 / 4) / 2,
    }
    assert report(run).done
    assert report(run).scores == pytest.approx(expected)
    assert report(run).accuracy == pytest.approx(4.5 / 8)
    (row,) = [row.fields for row in run.rows if row.kind == "eval"]
    assert {name: row[name] for name in expected} == report(run).scores
    assert run.get("trainer", FinishRun(reason="done"), RunFinished).evals == [report(run)]
