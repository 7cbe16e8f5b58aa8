"""The broker's rules, one test each; B = 4 samples (2 groups of 2) unless said otherwise."""

from contextlib import suppress

import msgspec
import pytest
from fakes.broker_world import as_sent, trajectory, world

from umbra.proto import messages as m
from umbra.proto.access import RULES
from umbra.services.buffer.effects import NackError, Reply

SENT = [
    k for k, rule in RULES.items() if rule.senders and rule.socket in ("any", "control", "data")
]


@pytest.mark.parametrize("kind", SENT)
def test_whatever_may_be_sent_to_the_buffer_is_answered_by_somebody(kind: type[m.Message]) -> None:
    run = world()
    empty = kind(**{one.name: None for one in msgspec.structs.fields(kind) if one.required})
    with suppress(AttributeError, TypeError):  # fields are None
        try:
            run.broker._dispatch(run.request("a", empty), 0.0)
        except NackError as refusal:
            assert refusal.code != "unexpected"


def test_a_run_from_the_first_sample_to_the_final_ledger() -> None:
    run = world(steps=3, run_ahead=1, max_staleness=1)
    for step in (1, 2, 3):
        run.produce("a", step - 1)
        batch = run.batch(step)
        assert [t.group_id for t in batch.trajectories[::2]] == [
            t.group_id for t in batch.trajectories[1::2]
        ]
        assert run.commit(step).version == step
    reply = run.get("trainer", m.FinishRun(reason="done"), m.RunFinished)
    assert (reply.ledger.issued, reply.ledger.trained) == (12, 12)
    assert reply.ledger.balance == 0 and not any(reply.ledger.in_flight.values())
    assert not run.store.keys("t/")


def test_without_run_ahead_batches_are_strictly_on_policy() -> None:
    run = world(run_ahead=0, max_staleness=3)
    for version in range(3):
        assert len(run.produce("a", version)) == 4
        batch = run.batch(version + 1)
        assert {t.oldest_version for t in batch.trajectories} == {version}
        run.commit(version + 1)
        assert run.lease("a", 4, version) == []  # weights of before the commit


def test_a_bound_below_run_ahead_holds_samples_back_and_never_deadlocks() -> None:
    run = world(run_ahead=3, max_staleness=1)
    first, *others = run.lease("a", 1000, 0)
    assert len(others) == 7  # batches 0 and 1; batch 2 needs version 1
    # A group of the very batch that is due fails: its replacement must still be leasable now.
    run.back("a", first, failed=True)
    assert [task.pinned_version for task in run.lease("a", 1000, 0)] == [-1, -1]


@pytest.mark.parametrize(
    ("groups", "others", "shares"),
    [(2, "b", [2, 1]), (6, "bc", [4])],  # half of 4; a third of 12
)
def test_the_first_to_ask_leaves_all_a_share(groups: int, others: str, shares: list[int]) -> None:
    """They do, if for newer weights."""
    run = world(run_ahead=0, batch_groups=groups)
    run.join("generator", "c")
    run.produce("a", 0)
    for name in others:
        run.ask(name, m.LeaseTasks(capacity=100, version=0, wait_s=9))
    run.train(1)
    assert [len(run.lease("a", 100, 1)) for _ in shares] == shares


def test_parked_questions_are_answered_by_a_commit_with_fair_shares() -> None:
    run = world(run_ahead=1, max_staleness=2)
    run.produce("a", 0)
    for name in "ab":
        assert run.ask(name, m.LeaseTasks(capacity=100, version=0, wait_s=9)) is None
    run.train(1)
    for name in "ab":
        (lease,) = run.late[name]
        assert isinstance(lease, m.TaskLeases) and len(lease.tasks) == 2


def test_a_parked_question_ends_empty_when_its_wait_is_over_or_a_newer_one_comes() -> None:
    run = world(run_ahead=0)
    run.produce("a", 0)
    assert run.ask("b", m.LeaseTasks(capacity=1, version=0, wait_s=2)) is None
    assert run.ask("b", m.LeaseTasks(capacity=1, version=0, wait_s=2)) is None
    assert run.late["b"] == [m.TaskLeases(tasks=[])]
    run.pass_time(2)
    assert run.late["b"] == 2 * [m.TaskLeases(tasks=[])]


def test_an_expired_lease_goes_to_the_one_who_waits() -> None:
    run = world(run_ahead=0, lease_s=30, dead_after_s=1000)
    (first, *_) = run.lease("a", 4, 0)
    run.ask("b", m.LeaseTasks(capacity=1, version=0, wait_s=99))
    run.pass_time(29)
    assert run.late["b"] == []
    run.pass_time(1)
    (lease,) = run.late["b"]
    assert isinstance(lease, m.TaskLeases)
    assert [(t.sample_id, t.attempt) for t in lease.tasks] == [(first.sample_id, 2)]
    refused = run.submit("a", trajectory(first, 0)).refused
    assert "lease 1 was lost" in refused[first.sample_id]
    assert run.broker.counters["wrong_attempt"] == 1
    assert run.broker.counters["expired_leases"] == 4


def test_only_the_lease_that_was_answered_counts_as_answered() -> None:
    """`a` loses a sample to `b`, who answers; what `a` has is no repetition of that answer."""
    run = world(run_ahead=0, batch_groups=1, group_size=1, lease_s=30, dead_after_s=1000)
    (first,) = run.lease("a", 1, 0)
    run.pass_time(30)
    (again,) = run.lease("b", 1, 0)
    assert (again.sample_id, again.attempt) == (first.sample_id, 2)
    assert not run.submit("b", trajectory(again, 0)).refused
    for become in (lambda: None, lambda: run.batch(1)):
        become()
        assert run.submit("b", trajectory(again, 0)).accepted == 1  # repeated
        assert run.submit("a", trajectory(first, 0)).refused
        for attempt, lost in ((2, False), (1, True), (0, True), (3, True)):
            lease = (first.sample_id, attempt)
            renewed = run.get("a", m.RenewLeases(leases=[lease]), m.TaskLeases)
            assert bool(renewed.lost) == lost
    assert run.broker.counters["duplicate_submits"] == 2
    run.commit(1)
    assert "was trained or has ended" in run.submit("b", trajectory(again, 0)).refused["s-0"]
    assert run.broker.counters["late_answers"] == run.pool.ledger.trained == 1


def test_a_renewed_lease_does_not_expire_and_lost_ones_are_named() -> None:
    run = world(run_ahead=0, lease_s=30, dead_after_s=1000)
    kept, lost, *_ = run.lease("a", 4, 0)
    run.pass_time(20)
    renewal = m.RenewLeases(leases=[(kept.sample_id, 1), (lost.sample_id, 7), ("s-99", 1)])
    assert run.ask("a", renewal) == m.TaskLeases(lost=[lost.sample_id, "s-99"])
    run.pass_time(20)
    assert run.pool.samples[kept.sample_id].holder == "a"
    assert run.pool.samples[lost.sample_id].holder == ""


@pytest.mark.parametrize("how", ["leave", "death", "restart"])
def test_what_a_gone_generator_held_is_leased_first_and_oldest_first(how: str) -> None:
    run = world(run_ahead=1, dead_after_s=5, max_attempts=1 if how == "leave" else 2)
    held = run.lease("a", 3, 0)
    if how == "leave":
        assert run.ask("a", m.Leave(reason="done")) == m.Ok()
        assert run.status.departed == {"a": "done"}
    elif how == "restart":
        assert isinstance(run.join("generator", "a", "a-2"), m.Welcome)
    else:
        run.pass_time(4)
        run.beat("b")
        run.beat("trainer")
        run.pass_time(2)
        assert run.status.departed == {"a": "dead: silent for 6 s"}
    assert run.broker.counters["dead_members"] == (how == "death")
    again = run.lease("b", 5, 0)
    assert [t.sample_id for t in again[:3]] == [t.sample_id for t in held]
    assert [t.attempt for t in again] == [2, 2, 2, 1, 1]


def test_a_sample_whose_leases_are_lost_too_often_ends_its_group_as_failed() -> None:
    run = world(run_ahead=0, max_attempts=2, lease_s=1, dead_after_s=1000)
    run.lease("a", 1, 0)
    run.pass_time(1)
    first, second = run.lease("a", 2, 0)
    run.pass_time(1)
    assert run.pool.ledger.ended == {"failed": 2}
    assert "has ended" in run.submit("a", trajectory(second, 0)).refused[second.sample_id]
    assert first.attempt == 2 and run.broker.counters["attempts_exhausted"] == 1
    assert len(run.lease("a", 100, 0)) == 4  # two samples were replaced


def test_handing_back_is_no_failure() -> None:
    run = world(max_attempts=1)
    for attempt in (1, 2, 3):
        (task,) = run.lease("a", 1, 0)
        assert (task.sample_id, task.attempt) == ("s-0", attempt)
        run.back("a", task)
    run.back("a", task)
    assert (run.broker.counters["returned"], run.broker.counters["late_returns"]) == (3, 1)


def test_a_failed_environment_ends_the_group_at_once_and_each_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = world()
    tasks = run.lease("a", 4, 0)
    for task in tasks[::2]:
        run.back("a", task, "reward timed out", failed=True)
    assert run.pool.ledger.ended == {"failed": 4}
    assert run.broker.counters["failed: reward timed out"] == 2
    (record,) = [r for r in caplog.records if "timed out" in r.getMessage()]
    assert "s-0" in record.getMessage() and "a" in record.getMessage()


def test_a_partial_outlives_the_buffer_and_is_continued_by_any_generator() -> None:
    run = world(run_ahead=1, max_staleness=1, durable=True)
    (task,) = run.lease("a", 1, 0)
    partial = trajectory(task, 0, finish_reason="partial")
    run.back("a", task, partial=partial)
    run.restart_broker()
    (again,) = run.lease("b", 1, 0)
    assert (again.sample_id, again.attempt, again.trajectory) == (task.sample_id, 2, partial)
    assert again.row == task.row != {}
    # It survives the death of the second holder, who returned nothing.
    run.ask("b", m.Leave(reason=""))
    assert run.lease("a", 1, 0)[0].trajectory == partial


def test_a_partial_too_old_is_dropped_and_the_sample_starts_from_scratch() -> None:
    run = world(group_size=1, batch_groups=1, run_ahead=1, max_staleness=1)
    (task,) = run.lease("a", 1, 0)
    run.steps("b", 1, 2)
    partial = trajectory(task, 0, finish_reason="partial")
    run.back("a", task, partial=partial)
    (again,) = run.lease("b", 1, 2)
    assert (again.sample_id, again.attempt, again.trajectory) == ("s-0", 2, None)
    assert run.broker.counters["partials_too_old"] == 1


def test_a_late_answer_is_taken_while_nobody_else_has_the_sample() -> None:
    run = world(lease_s=1, dead_after_s=1000)
    (task,) = run.lease("a", 1, 0)
    run.pass_time(1)
    assert run.submit("a", trajectory(task, 0)).accepted == 1
    assert run.broker.counters["late_accepted"] == 1
    assert [t.sample_id for t in run.lease("b", 1, 0)] == ["s-1"]


def test_answers_to_nothing_are_refused() -> None:
    run = world()
    first, second = run.lease("a", 2, 0)
    strange = trajectory(first, 0, sample_id="s-77")
    early = trajectory(second, 0, attempt=0)
    ack = run.submit("a", strange, early)
    assert ack.accepted == 0 and set(ack.refused) == {"s-77", second.sample_id}
    assert "a has the lease" in run.submit("b", trajectory(first, 0)).refused[first.sample_id]


def test_who_delivers_may_ask_for_more_in_the_same_message() -> None:
    run = world(run_ahead=1, max_staleness=1)
    mine = run.lease("a", 2, 0)
    assert run.lease("b", 2, 0)
    run.ask("a", m.LeaseTasks(capacity=1, version=0, wait_s=9))
    done = m.SubmitResults(trajectories=[trajectory(task, 0) for task in mine], capacity=3)
    ack = run.get("a", done, m.TaskLeases)
    assert (ack.accepted, len(ack.tasks)) == (2, 3)
    assert {task.sample_id for task in ack.tasks}.isdisjoint(task.sample_id for task in mine)
    assert run.pool.ledger.in_flight["generating"] == 2 + 1 + 3


def test_a_delivery_is_acknowledged_at_once_where_there_is_no_work() -> None:
    run = world(run_ahead=0)
    mine = run.lease("a", 4, 0)
    done = m.SubmitResults(trajectories=[trajectory(task, 0) for task in mine], capacity=3)
    ack = run.get("a", done, m.TaskLeases)
    assert (ack.accepted, ack.tasks) == (4, [])
    run.train(1)
    assert not run.late["a"], "nothing waits that could be answered later"


def test_a_delivery_that_names_no_version_there_is_counts_all_the_same() -> None:
    run = world()
    first, task = run.lease("a", 2, 0)
    run.get("a", m.SubmitResults(trajectories=[trajectory(first, 0)], version=7), m.TaskLeases)
    assert not run.broker.counters["wrong_version"], "it asks for nothing"
    done = m.SubmitResults(trajectories=[trajectory(task, 0)], capacity=1, version=7)
    ack = run.get("a", done, m.TaskLeases)
    assert (ack.accepted, ack.tasks) == (1, [])
    assert run.broker.counters["wrong_version"] == 1


def test_a_delivery_sent_again_after_a_restart_is_answered_with_the_same_samples() -> None:
    run = world(durable=True, run_ahead=1, max_staleness=1)
    (task, *_) = run.lease("a", 1, 0)
    done = m.SubmitResults(trajectories=[trajectory(task, 0)], capacity=2)
    first = run.ask("a", done, number=77)
    run.restart_broker()
    again = run.ask("a", done, number=77)
    assert run.ask("a", done, number=77) == again
    assert isinstance(first, m.TaskLeases) and isinstance(again, m.TaskLeases)
    assert [t.sample_id for t in first.tasks] == [t.sample_id for t in again.tasks]
    assert (again.accepted, len(again.tasks)) == (1, 2)
    assert run.pool.ledger.in_flight["generating"] == 2


def test_what_came_together_is_answered_as_if_one_after_the_other() -> None:
    """Scenario: two generators fill the batch that the trainer waits for, and ask for more.

    Result: in one turn as in several; the trainer is answered once, after them.
    """
    apart, together = (world(run_ahead=1, max_staleness=1) for _ in range(2))
    answers: list[list[m.Message]] = []
    for run, at_once in ((apart, False), (together, True)):
        run.ask("trainer", m.LeaseBatch(step=1, wait_s=9))
        tasks = {name: run.lease(name, 2, 0) for name in "ab"}
        requests = [
            run.request(name, m.SubmitResults(trajectories=[trajectory(task, 0) for task in held]))
            for name, held in tasks.items()
        ]
        requests += [run.request(n, m.LeaseTasks(capacity=2, version=0, wait_s=0)) for n in "ba"]
        broker = run.broker
        effects = (
            broker.handle_all(requests, run.now)
            if at_once
            else [effect for request in requests for effect in broker.handle(request, run.now)]
        )
        answers.append([as_sent(one.body) for one in effects if isinstance(one, Reply)])
        assert run.pool.ledger.snapshot().balance == 0

    def kinds(bodies: list[m.Message]) -> list[str]:
        return sorted(type(body).__name__ for body in bodies)

    assert kinds(answers[0]) == kinds(answers[1])
    assert [body for body in answers[1] if not isinstance(body, m.BatchLease)] == [
        body for body in answers[0] if not isinstance(body, m.BatchLease)
    ]
    assert isinstance(answers[1][-1], m.BatchLease) and len(answers[1][-1].trajectories) == 4
