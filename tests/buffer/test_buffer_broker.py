"""The broker's rules, one test each; B = 4 samples (2 groups of 2) unless said otherwise."""

import pytest
from fakes.broker_world import as_sent, trajectory, world

from umbra.proto import messages as m
from umbra.proto.access import LEASE_BYTES
from umbra.proto.records import Score
from umbra.services.buffer.effects import Reply
from umbra.services.buffer.samples import groups
from umbra.services.buffer.samples.ledger import LedgerError, RunningLedger


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
    """Others wait for newer weights, and have theirs once the commit brings them work."""
    run = world(run_ahead=0, batch_groups=groups)
    run.join("generator", "c")
    run.produce("a", 0)
    for name in others:
        run.ask(name, m.LeaseTasks(capacity=100, version=0, wait_s=9))
    run.train(1)
    assert [len(run.lease("a", 100, 1)) for _ in shares] == shares
    run = world(run_ahead=1, batch_groups=groups, max_staleness=2)
    run.produce("a", 0)
    for name in "ab":
        assert run.ask(name, m.LeaseTasks(capacity=100, version=0, wait_s=9)) is None
    run.train(1)
    assert [len(run.leased(name)) for name in "ab"] == [groups, groups]


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
    assert [(t.sample_id, t.attempt) for t in run.leased("b")] == [(first.sample_id, 2)]
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


def test_leases_that_are_lost_too_often_fail_their_group_and_those_handed_back_do_not() -> None:
    run = world(run_ahead=0, max_attempts=2, lease_s=1, dead_after_s=1000)
    for attempt in (1, 2, 3):
        (task,) = run.lease("a", 1, 0)
        assert (task.sample_id, task.attempt) == ("s-0", attempt)
        run.back("a", task)
    run.back("a", task)
    assert (run.broker.counters["returned"], run.broker.counters["late_returns"]) == (3, 1)
    run.lease("a", 1, 0)
    run.pass_time(1)
    first, second = run.lease("a", 2, 0)
    run.pass_time(1)
    assert run.pool.ledger.ended == {"failed": 2}
    assert "has ended" in run.submit("a", trajectory(second, 0)).refused[second.sample_id]
    assert first.attempt == 5 and run.broker.counters["attempts_exhausted"] == 1
    assert len(run.lease("a", 100, 0)) == 4  # two samples were replaced


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
    ack = run.submit("a", trajectory(first, 0, sample_id="s-77"), trajectory(second, 0, attempt=0))
    assert ack.accepted == 0 and set(ack.refused) == {"s-77", second.sample_id}
    assert "a has the lease" in run.submit("b", trajectory(first, 0)).refused[first.sample_id]


def test_who_delivers_may_ask_for_more_in_the_same_message() -> None:
    """It is acknowledged at once where there is no work, or no such version."""
    run = world(run_ahead=1, max_staleness=1)
    mine = run.lease("a", 2, 0)
    assert run.lease("b", 2, 0)
    run.ask("a", m.LeaseTasks(capacity=1, version=0, wait_s=9))
    ack = run.deliver("a", mine, capacity=3)
    assert (ack.accepted, len(ack.tasks)) == (2, 3)
    assert {task.sample_id for task in ack.tasks}.isdisjoint(task.sample_id for task in mine)
    assert run.pool.ledger.in_flight["generating"] == 2 + 1 + 3
    assert run.deliver("a", ack.tasks[:1], version=7).accepted == 1
    assert not run.broker.counters["wrong_version"], "it asks for nothing"
    unknown = run.deliver("a", ack.tasks[1:2], capacity=1, version=7)
    assert (unknown.accepted, unknown.tasks) == (1, [])
    assert run.broker.counters["wrong_version"] == 1
    rest = run.deliver("a", ack.tasks[2:], capacity=100).tasks
    none = run.deliver("a", rest, capacity=3)
    assert (none.accepted, none.tasks) == (len(rest), [])


def test_a_delivery_sent_again_after_a_restart_is_answered_with_the_same_samples() -> None:
    run = world(durable=True, run_ahead=1, max_staleness=1)
    mine = run.lease("a", 1, 0)
    first = run.deliver("a", mine, capacity=2, number=77)
    run.restart_broker()
    again = run.deliver("a", mine, capacity=2, number=77)
    assert run.deliver("a", mine, capacity=2, number=77) == again
    assert [t.sample_id for t in first.tasks] == [t.sample_id for t in again.tasks]
    assert (again.accepted, len(again.tasks)) == (1, 2)
    assert run.pool.ledger.in_flight["generating"] == 2


def test_what_came_together_is_answered_as_if_one_after_the_other() -> None:
    """Two generators fill the batch that the trainer waits for, and ask for more.

    In one turn as in several; the trainer is answered once, after them.
    """
    answers: list[list[m.Message]] = []
    for at_once in (False, True):
        run = world(run_ahead=1, max_staleness=1)
        run.ask("trainer", m.LeaseBatch(step=1, wait_s=9))
        results = {
            name: m.SubmitResults(trajectories=[trajectory(task, 0) for task in held])
            for name, held in [(name, run.lease(name, 2, 0)) for name in "ab"]
        }
        requests = [run.request(name, body) for name, body in results.items()]
        requests += [run.request(n, m.LeaseTasks(capacity=2, version=0, wait_s=0)) for n in "ba"]
        effects = [
            effect
            for turn in ([requests] if at_once else [[one] for one in requests])
            for effect in run.broker.handle_all(turn, run.now)
        ]
        answers.append([as_sent(one.body) for one in effects if isinstance(one, Reply)])
        assert run.pool.ledger.snapshot().balance == 0
    apart, together = (
        [body for body in bodies if not isinstance(body, m.BatchLease)] for bodies in answers
    )
    assert apart == together and len(answers[0]) == len(answers[1])
    assert isinstance(answers[1][-1], m.BatchLease) and len(answers[1][-1].trajectories) == 4


def test_leases_are_filled_by_bytes_as_well_as_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply fits into a frame, and the rest comes with the next one; a larger row comes alone."""
    assert groups.FILL_BYTES + (4 << 20) < LEASE_BYTES
    run = world(stages=["ref_logp"])
    run.join("scorer", "r")
    for fill_bytes, samples in ((10, 1), (40, 3)):  # a row has 15
        monkeypatch.setattr(groups, "FILL_BYTES", fill_bytes)
        assert len(run.produce("a", 0, 8)) == samples
        assert len(run.to_score("r", "ref_logp")) == 1, "with its trajectory it has more"
    monkeypatch.undo()
    assert len(run.to_score("r", "ref_logp")) == 2


def test_a_scorer_cannot_replace_what_it_scores_nor_gets_samples_with_its_ack() -> None:
    run = world(stages=["ref_logp"])
    run.join("scorer", "r")
    (task,) = run.lease("a", 1, 0)
    made = trajectory(task, 0)
    run.submit("a", made)
    (scoring,) = run.to_score("r", "ref_logp", 1)
    assert scoring.attempt == task.attempt
    other = trajectory(task, 0, 0)
    assert run.get("r", m.RenewLeases(partials=[other]), m.TaskLeases).lost == [task.sample_id]
    assert run.pool.journal.trajectory(task.sample_id) == made
    score = Score(sample_id=task.sample_id, attempt=1, logprobs=made.logprobs)
    ack = run.get("r", m.SubmitResults(scores=[score], capacity=8), m.TaskLeases)
    assert (ack.accepted, ack.tasks) == (1, [])


def test_a_move_that_there_is_not_and_a_broken_balance_are_internal_errors() -> None:
    ledger = RunningLedger()
    for source, target in (("training", "queued"), ("ready", "generating"), ("queued", "training")):
        with pytest.raises(LedgerError, match=f"from {source} to {target}"):
            ledger.move(source, target)
    ledger.issue(1)
    ledger.issued += 1
    with pytest.raises(LedgerError, match="out of balance by 1") as caught:
        ledger.check()
    assert caught.value.exit_code == 6
