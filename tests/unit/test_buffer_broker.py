"""The broker's rules, one test each; B = 4 samples (2 groups of 2) unless said otherwise."""

from __future__ import annotations

import math

import pytest
from fakes.broker_world import World, trajectory

from umbra.proto.messages import (
    BatchLease,
    Command,
    CommitBatch,
    FinishRun,
    HeartbeatAck,
    Join,
    LeaseBatch,
    LeaseSamples,
    Leave,
    Nack,
    Ok,
    Ping,
    Pong,
    RenewAck,
    RenewLeases,
    ReturnedSample,
    ReturnSamples,
    Role,
    RunFinished,
    SampleLeases,
    Status,
    StatusRequest,
    SubmitTrajectories,
    Welcome,
)
from umbra.proto.records import VersionSpan, pack_float32, pack_int32


def world(**options: object) -> World:
    """A world with generators `a` and `b` and a trainer."""
    made = World(**options)
    made.join("generator", "a")
    made.join("generator", "b")
    made.join("trainer", "trainer")
    return made


def give_back(made: World, name: str, sample: ReturnedSample) -> None:
    assert made.ask(name, ReturnSamples(samples=[sample])) == Ok()


# -- a whole run ----------------------------------------------------------------------------------


def test_a_run_from_the_first_sample_to_the_final_ledger() -> None:
    run = world(steps=3, run_ahead=1, max_staleness=1)
    for step in (1, 2, 3):
        run.produce("a", step - 1)
        batch = run.batch(step)
        assert [t.group_id for t in batch.trajectories[::2]] == [
            t.group_id for t in batch.trajectories[1::2]
        ]
        assert run.commit(step).version == step
    reply = run.get("trainer", FinishRun(reason="done"), RunFinished)
    assert (reply.ledger.issued, reply.ledger.trained) == (12, 12)
    assert reply.ledger.balance == 0 and not any(reply.ledger.in_flight.values())
    assert not run.store.keys("t/")


def test_no_more_samples_are_issued_than_the_run_trains() -> None:
    run = world(steps=2, run_ahead=5, max_staleness=5)
    assert len(run.lease("a", 1000, 0)) == 8
    assert run.lease("b", 1000, 0) == []


# -- admission and leases --------------------------------------------------------------------------


def test_generation_runs_ahead_by_whole_batches() -> None:
    run = world(run_ahead=1)
    assert len(run.produce("a", 0)) == 8
    assert run.lease("a", 1, 0) == []
    run.batch(1)
    assert run.lease("a", 1, 0) == []
    run.commit(1)
    assert len(run.produce("a", 0)) == 4


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
    assert len(run.lease("a", 1000, 0)) == 8  # batches 0 and 1; batch 2 needs version 1
    # A group of the very batch that is due fails: its replacement must still be leasable now.
    first = next(iter(run.pool.samples.values()))
    failed = ReturnedSample(sample_id=first.sample_id, attempt=1, reason="x", failed=True)
    give_back(run, "a", failed)
    assert len(run.lease("a", 1000, 0)) == 2


def test_a_generator_with_old_weights_gets_no_sample_that_they_would_make_stale() -> None:
    run = world(run_ahead=1, max_staleness=1)
    run.produce("a", 0)
    run.batch(1)
    run.commit(1)
    assert run.lease("a", 4, 0) == []  # batch 2, bound 1: version 1 or newer
    assert len(run.lease("a", 4, 1)) == 4


def test_the_first_to_ask_leaves_a_share_to_those_that_wait() -> None:
    run = world(run_ahead=0)
    run.produce("a", 0)
    run.ask("b", LeaseSamples(capacity=100, version=0, wait_s=9))
    run.batch(1)
    run.commit(1)
    assert len(run.lease("a", 100, 1)) == 2  # half of 4; b waits too, if for newer weights
    assert len(run.lease("a", 100, 1)) == 1


def test_parked_questions_are_answered_by_a_commit_with_fair_shares() -> None:
    run = world(run_ahead=1, max_staleness=2)
    run.produce("a", 0)
    for name in "ab":
        assert run.ask(name, LeaseSamples(capacity=100, version=0, wait_s=9)) is None
    run.batch(1)
    run.commit(1)
    for name in "ab":
        (lease,) = run.late[name]
        assert isinstance(lease, SampleLeases) and len(lease.tasks) == 2


def test_a_parked_question_ends_empty_when_its_wait_is_over_or_a_newer_one_comes() -> None:
    run = world(run_ahead=0)
    run.produce("a", 0)
    assert run.ask("b", LeaseSamples(capacity=1, version=0, wait_s=2)) is None
    assert run.ask("b", LeaseSamples(capacity=1, version=0, wait_s=2)) is None
    assert run.late["b"] == [SampleLeases(tasks=[])]
    run.pass_time(2)
    assert run.late["b"] == 2 * [SampleLeases(tasks=[])]


@pytest.mark.parametrize("version", [-1, 1])
def test_a_version_that_does_not_exist_is_refused(version: int) -> None:
    run = world()
    reply = run.ask("a", LeaseSamples(capacity=1, version=version, wait_s=0))
    assert isinstance(reply, Nack) and reply.code == "wrong_version"


# -- lost leases -----------------------------------------------------------------------------------


def test_an_expired_lease_goes_to_the_one_who_waits() -> None:
    run = world(run_ahead=0, lease_s=30, dead_after_s=1000)
    (first, *_) = run.lease("a", 4, 0)
    run.ask("b", LeaseSamples(capacity=1, version=0, wait_s=99))
    run.pass_time(29)
    assert run.late["b"] == []
    run.pass_time(1)
    (lease,) = run.late["b"]
    assert isinstance(lease, SampleLeases)
    assert [(t.sample_id, t.attempt) for t in lease.tasks] == [(first.sample_id, 2)]
    refused = run.submit("a", trajectory(first, 0)).refused
    assert "lease 1 was lost" in refused[first.sample_id]
    assert run.broker.counters["wrong_attempt"] == 1
    assert run.broker.counters["expired_leases"] == 4


def test_a_renewed_lease_does_not_expire_and_lost_ones_are_named() -> None:
    run = world(run_ahead=0, lease_s=30, dead_after_s=1000)
    kept, lost, *_ = run.lease("a", 4, 0)
    run.pass_time(20)
    renewal = RenewLeases(leases=[(kept.sample_id, 1), (lost.sample_id, 7), ("s-99", 1)])
    assert run.ask("a", renewal) == RenewAck(lost=[lost.sample_id, "s-99"])
    run.pass_time(20)
    assert run.pool.samples[kept.sample_id].holder == "a"
    assert run.pool.samples[lost.sample_id].holder == ""


def test_an_accepted_answer_is_not_called_lost() -> None:
    run = world()
    task, *_ = run.lease("a", 1, 0)
    run.submit("a", trajectory(task, 0))
    assert run.ask("a", RenewLeases(leases=[(task.sample_id, 1)])) == RenewAck(lost=[])


@pytest.mark.parametrize("how", ["leave", "death", "restart"])
def test_what_a_gone_generator_held_is_leased_first_and_oldest_first(how: str) -> None:
    run = world(run_ahead=1, dead_after_s=5)
    held = run.lease("a", 3, 0)
    if how == "leave":
        assert run.ask("a", Leave(reason="done")) == Ok()
        assert run.broker.status(run.now).departed == {"a": "done"}
    elif how == "restart":
        assert isinstance(run.join("generator", "a", "a-2"), Welcome)
    else:
        run.pass_time(4)
        run.beat("b"), run.beat("trainer")
        run.pass_time(2)
        assert run.broker.status(run.now).departed == {"a": "dead: silent for 6 s"}
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
    assert "over: failed" in run.submit("a", trajectory(second, 0)).refused[second.sample_id]
    assert first.attempt == 2 and run.broker.counters["attempts_exhausted"] == 1
    assert len(run.lease("a", 100, 0)) == 4  # two samples were replaced


def test_handing_back_is_no_failure() -> None:
    run = world(max_attempts=1)
    for attempt in (1, 2, 3):
        (task,) = run.lease("a", 1, 0)
        assert (task.sample_id, task.attempt) == ("s-0", attempt)
        give_back(run, "a", ReturnedSample(sample_id="s-0", attempt=attempt, reason="drain"))


def test_a_failed_environment_ends_the_group_at_once_and_each_reason_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = world()
    tasks = run.lease("a", 4, 0)
    for task in tasks[::2]:
        failed = ReturnedSample(
            sample_id=task.sample_id, attempt=1, reason="reward timed out", failed=True
        )
        give_back(run, "a", failed)
    assert run.pool.ledger.ended == {"failed": 4}
    assert run.broker.counters["failed: reward timed out"] == 2
    (record,) = [r for r in caplog.records if "timed out" in r.getMessage()]
    assert "s-0" in record.getMessage() and "a" in record.getMessage()


# -- partials --------------------------------------------------------------------------------------


def test_a_partial_is_continued_by_any_generator() -> None:
    run = world(run_ahead=1, max_staleness=1)
    (task,) = run.lease("a", 1, 0)
    partial = trajectory(task, 0, finish_reason="partial")
    give_back(
        run, "a", ReturnedSample(sample_id="s-0", attempt=1, reason="drain", partial=partial)
    )
    (again,) = run.lease("b", 1, 0)
    assert again.partial == partial and again.attempt == 2
    # It survives the death of the second holder, who returned nothing.
    run.ask("b", Leave(reason=""))
    assert run.lease("a", 1, 0)[0].partial == partial


def test_a_partial_too_old_is_dropped_and_the_sample_starts_from_scratch() -> None:
    run = world(group_size=1, batch_groups=1, run_ahead=1, max_staleness=1)
    (task,) = run.lease("a", 1, 0)
    for step in (1, 2):
        run.produce("b", step - 1)
        run.batch(step)
        run.commit(step)
    partial = trajectory(task, 0, finish_reason="partial")
    give_back(run, "a", ReturnedSample(sample_id="s-0", attempt=1, reason="x", partial=partial))
    (again,) = run.lease("b", 1, 2)
    assert (again.sample_id, again.attempt, again.partial) == ("s-0", 2, None)
    assert run.broker.counters["partials_too_old"] == 1


def test_a_malformed_partial_is_not_kept() -> None:
    run = world()
    (task,) = run.lease("a", 1, 0)
    bad = trajectory(task, 0, loss_mask=b"")
    give_back(run, "a", ReturnedSample(sample_id="s-0", attempt=1, reason="x", partial=bad))
    assert run.lease("a", 1, 0)[0].partial is None
    assert run.broker.counters["malformed_partial"] == 1


# -- answers ---------------------------------------------------------------------------------------


def test_a_repeated_answer_is_acknowledged_whatever_became_of_the_sample() -> None:
    run = world(run_ahead=0)
    tasks = run.lease("a", 4, 0)
    answers = [trajectory(task, 0) for task in tasks]
    for _ in range(2):
        assert run.submit("a", *answers).accepted == 4
    run.batch(1)
    assert run.submit("a", *answers).accepted == 4
    run.commit(1)
    assert run.submit("a", *answers).accepted == 4
    assert run.broker.counters["duplicate_submits"] == 12
    assert run.pool.ledger.trained == 4


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"response_ids": b"abc"}, "whole int32"),
        ({"response_ids": b"", "loss_mask": b"", "logprobs": b"", "spans": []}, "no response"),
        ({"loss_mask": b"\1"}, "loss_mask has 1 entries for 2"),
        ({"loss_mask": b"\1\2"}, "other than 0 and 1"),
        ({"logprobs": pack_float32([0.0])}, "logprobs has 4 bytes"),
        ({"logprobs": pack_float32([0.0, math.inf])}, "logprobs has values"),
        ({"ref_logprobs": pack_float32([math.nan, 0.0])}, "ref_logprobs has values"),
        ({"proximal_logprobs": b""}, "proximal_logprobs has 0 bytes"),
        ({"prompt_ids": b"abc"}, "whole int32"),
        ({"spans": []}, "spans end at token 0 of 2"),
        ({"spans": [VersionSpan(version=0, start=1, end=2)]}, "does not follow token 0"),
        ({"spans": [VersionSpan(version=0, start=0, end=3)]}, "spans end at token 3 of 2"),
        ({"spans": [VersionSpan(version=0, start=0, end=0)]}, "does not follow"),
        ({"spans": [VersionSpan(version=1, start=0, end=2)]}, "only 0 to 0 exist"),
        ({"reward": math.nan}, "reward is nan"),
        ({"reward_parts": {"x": math.inf}}, "reward_parts"),
        ({"group_id": "g-9"}, "group_id"),
        ({"response_ids": pack_int32([1, 2, 3])}, "loss_mask has 2 entries for 3"),
    ],
)
def test_a_malformed_answer_is_refused_and_the_sample_queued_again(
    changes: dict[str, object], words: str
) -> None:
    run = world()
    (task,) = run.lease("a", 1, 0)
    refused = run.submit("a", trajectory(task, 0, **changes)).refused
    assert words in refused[task.sample_id]
    assert run.broker.counters["malformed_trajectory"] == 1
    assert [(t.sample_id, t.attempt) for t in run.lease("b", 1, 0)] == [(task.sample_id, 2)]


# -- staleness -------------------------------------------------------------------------------------


def test_a_straggler_past_the_bound_ends_its_group_as_stale_and_is_replaced() -> None:
    run = world(run_ahead=1, max_staleness=1)
    straggler, sibling = run.lease("a", 2, 0)
    run.submit("a", trajectory(sibling, 0))
    run.produce("b", 0)  # three groups
    for step in (1, 2):
        run.batch(step)
        run.commit(step)
        run.produce("b", step)
    assert run.pool.ledger.ended == {"stale": 2}  # swept with the commit of step 2
    refused = run.submit("a", trajectory(straggler, 0)).refused
    assert refused == {straggler.sample_id: "over: stale"}


def test_a_stale_answer_ends_its_group() -> None:
    run = world(run_ahead=1, max_staleness=1)
    straggler, _ = run.lease("a", 2, 0)
    run.produce("b", 0)
    for step in (1, 2):
        run.batch(step)
        run.commit(step)
        run.produce("b", step)
    refused = run.submit("a", trajectory(straggler, 0)).refused
    assert "stale: a token of version 0, the trainer is at 2" in refused[straggler.sample_id]
    assert run.pool.ledger.ended == {"stale": 2}


def test_staleness_of_trained_samples_is_split_by_where_it_arose() -> None:
    run = world(run_ahead=1, max_staleness=2)
    tasks = run.lease("a", 8, 0)
    run.submit("a", *(trajectory(task, 0) for task in tasks[:4]))
    run.batch(1)
    run.commit(1)
    # Half of the second batch has seen the update, half has not.
    run.submit("a", *(trajectory(task, 0, 1) for task in tasks[4:6]))
    run.submit("a", *(trajectory(task, 0) for task in tasks[6:]))
    run.batch(2)
    run.commit(2)
    status = run.broker.status(run.now)
    # 4 samples of staleness 0, then 2 in flight and 2 in queue of staleness 1.
    assert status.staleness == {
        "mean": 0.5,
        "max": 1.0,
        "in_flight_mean": 0.25,
        "in_queue_mean": 0.25,
        "mixed_fraction": 0.25,
        "last_mean": 1.0,
        "last_max": 1.0,
        "bound": 2.0,
        "typical": 1.0,
    }
    assert status.counters["mixed_version"] == 2
    assert [row.fields["step"] for row in run.rows if row.kind == "batch"] == [1, 2]
    assert run.rows[1].fields["staleness_in_flight_mean"] == 0.5


# -- the trainer -----------------------------------------------------------------------------------


def test_a_batch_is_handed_out_as_soon_as_it_is_full() -> None:
    run = world(run_ahead=0)
    assert run.ask("trainer", LeaseBatch(step=1, wait_s=9)) is None
    run.produce("a", 0, capacity=3)
    assert run.late["trainer"] == []
    run.produce("a", 0)
    (batch,) = run.late["trainer"]
    assert isinstance(batch, BatchLease) and len(batch.trajectories) == 4


def test_a_batch_that_is_not_full_says_what_it_waits_for() -> None:
    run = world(run_ahead=0)
    assert "0 of 2 groups complete; no generator has asked" in run.batch(1).waiting_for
    run.produce("a", 0, capacity=2)
    run.lease("b", 1, 0)
    run.ask("trainer", LeaseBatch(step=1, wait_s=3.25))
    run.pass_time(3.25)
    (reply,) = run.late["trainer"]
    assert reply == BatchLease(
        step=1,
        trajectories=[],
        waiting_for="1 of 2 groups complete; waiting for sample s-2 held by b for 3.2 s",
    )
    run.ask("b", Leave(reason=""))
    assert "sample s-2 is queued for a generator" in run.batch(1).waiting_for
    run.ask("a", Leave(reason=""))
    assert "no generator has joined" in run.batch(1).waiting_for


def test_a_restarted_trainer_gets_the_identical_batch() -> None:
    run = world(run_ahead=1)
    run.produce("a", 0)
    first = run.batch(1)
    assert run.batch(1) == first
    assert isinstance(run.join("trainer", "trainer", "trainer-2"), Welcome)
    assert run.batch(1) == first
    run.ask("trainer", Leave(reason="crash"))
    run.join("trainer", "other")
    assert run.get("other", LeaseBatch(step=1, wait_s=0), BatchLease) == first
    assert run.pool.ledger.count("training") == 4


def test_commits_are_counted_once_and_only_for_what_was_leased() -> None:
    run = world(run_ahead=0)
    run.produce("a", 0)
    early = run.ask("trainer", CommitBatch(step=1))
    assert isinstance(early, Nack) and early.code == "not_leased"
    run.batch(1)
    assert run.commit(1).version == 1
    assert run.commit(1).version == 1
    assert run.pool.ledger.trained == 4
    assert run.broker.counters["repeated_commits"] == 1
    assert isinstance(run.ask("trainer", CommitBatch(step=0)), Nack)


@pytest.mark.parametrize("step", [0, 2, 4])
def test_only_the_next_step_can_be_leased(step: int) -> None:
    reply = world(steps=3).ask("trainer", LeaseBatch(step=step, wait_s=0))
    assert isinstance(reply, Nack) and reply.code == "wrong_step"
    assert "so the next is 1" in reply.reason


def test_there_is_no_step_after_the_last() -> None:
    run = world(steps=1)
    run.produce("a", 0)
    run.batch(1), run.commit(1)
    reply = run.ask("trainer", LeaseBatch(step=2, wait_s=0))
    assert isinstance(reply, Nack) and reply.reason.endswith("1 of 1 steps are committed")


def test_a_second_trainer_is_refused_while_the_first_lives() -> None:
    run = world(dead_after_s=5)
    refusal = run.join("trainer", "other")
    assert isinstance(refusal, Nack) and refusal.code == "duplicate_trainer"
    assert "'trainer'" in refusal.reason
    run.pass_time(6)
    assert isinstance(run.join("trainer", "other"), Welcome)


def test_a_trainer_with_a_batch_may_be_silent_for_longer() -> None:
    run = world(dead_after_s=5, batch_lease_s=50)
    run.produce("a", 0)
    run.batch(1)
    run.pass_time(49)
    assert [peer.name for peer in run.broker.members.peers.values()] == ["trainer"]
    run.pass_time(2)
    assert not run.broker.members.peers


# -- membership ------------------------------------------------------------------------------------


def test_requests_are_only_for_members_of_the_right_role() -> None:
    run = world()
    for name, body, code in [
        ("stranger", LeaseSamples(capacity=1, version=0, wait_s=0), "not_member"),
        ("a", LeaseBatch(step=1, wait_s=0), "wrong_role"),
        ("a", CommitBatch(step=1), "wrong_role"),
        ("a", FinishRun(reason=""), "wrong_role"),
        ("trainer", SubmitTrajectories(trajectories=[]), "wrong_role"),
        ("a", SampleLeases(tasks=[]), "unexpected"),
    ]:
        reply = run.ask(name, body)
        assert isinstance(reply, Nack) and reply.code == code, body
        assert run.broker.counters[code] > 0


def test_an_older_incarnation_is_refused_for_ever() -> None:
    run = world()
    run.join("generator", "a", "a-2")
    assert isinstance(run.beat("a"), HeartbeatAck)
    body = Join(role="generator", name="a", pid=1, host="h", package_version="0")
    for old in (LeaseSamples(capacity=1, version=0, wait_s=0), body):
        reply = run.ask("a", old, "a-1")
        assert isinstance(reply, Nack) and reply.code == "stale_incarnation"


def test_the_same_incarnation_may_join_again_and_keeps_its_leases() -> None:
    run = world()
    run.lease("a", 3, 0)
    assert isinstance(run.join("generator", "a"), Welcome)
    assert len(run.pool.held["a"]) == 3


def test_a_member_that_was_dead_is_told_so_and_may_join_again() -> None:
    run = world(dead_after_s=5)
    run.pass_time(6)
    reply = run.beat("a")
    assert isinstance(reply, Nack) and "dead: silent for 6 s" in reply.reason
    assert isinstance(run.join("generator", "a"), Welcome)


def test_a_parked_question_of_a_gone_member_is_not_answered() -> None:
    run = world(run_ahead=0)
    run.produce("a", 0)
    run.ask("b", LeaseSamples(capacity=1, version=0, wait_s=5))
    run.join("generator", "b", "b-2")
    run.pass_time(6)
    assert run.late["b"] == []


def test_the_hub_is_told_to_everyone() -> None:
    run = world()
    body = Join(
        role="weight_hub", name="hub", pid=1, host="h", package_version="0",
        endpoints={"weights": "tcp://h:9"},
    )  # fmt: skip
    assert isinstance(run.ask("hub", body), Welcome)
    assert run.beat("a") == HeartbeatAck(version=0, weights="tcp://h:9")
    run.ask("hub", Leave(reason=""))
    assert run.beat("a") == HeartbeatAck(version=0, weights="")


@pytest.mark.parametrize("role", ["trainer", "weight_hub"])
def test_pings_and_status_need_no_membership(role: Role) -> None:
    run = world()
    assert run.ask("anyone", Ping()) == Pong(role="buffer", state="ready")
    status = run.get("anyone", StatusRequest(), Status)
    assert [member.name for member in status.members] == ["a", "b", "trainer"]
    assert run.ask("anyone", Ok()) is None


# -- what is stuck ---------------------------------------------------------------------------------


def test_the_status_names_what_is_overdue() -> None:
    run = world(
        run_ahead=0, lease_s=10, stall_s=30, heartbeat_s=1, dead_after_s=1000, batch_lease_s=20
    )
    task, *_ = run.lease("a", 4, 0)
    run.batch(1)
    for _ in range(8):
        run.pass_time(5)
        run.ask("a", RenewLeases(leases=[(task.sample_id, 1)]))
        run.beat("a", idle_s=run.now)
    stuck = {item.what: item for item in run.broker.status(run.now).stuck}
    sample = stuck["sample s-0 of group g-0, attempt 1"]
    assert (sample.holder, sample.age_s) == ("a", 40)
    assert stuck["no progress in 'x'"].holder == "a"
    assert {item.holder for item in stuck.values() if item.what == "no heartbeat"} == {"trainer"}
    (batch,) = [item for item in stuck.values() if item.what.startswith("batch of step 1")]
    assert "waiting for sample s-0 held by a for 40.0 s" in batch.what and batch.age_s == 40


def test_a_batch_that_is_not_committed_is_overdue() -> None:
    run = world(batch_lease_s=20, dead_after_s=1000)
    run.produce("a", 0)
    run.batch(1)
    run.pass_time(21)
    assert "batch of step 1, not committed" in {i.what for i in run.broker.status(run.now).stuck}


# -- the end ---------------------------------------------------------------------------------------


def test_finishing_cancels_what_is_in_flight_and_asks_everyone_to_leave() -> None:
    run = world()
    run.produce("a", 0, capacity=5)
    tasks = run.lease("b", 2, 0)
    run.batch(1)
    run.join("monitor", "m")
    ledger = run.get("trainer", FinishRun(reason="steps reached"), RunFinished).ledger
    assert ledger.ended == {"cancelled": ledger.issued} and ledger.balance == 0
    assert {name for name, body in run.pushes if isinstance(body, Command)} == {
        "a", "b", "trainer", "m",
    }  # fmt: skip
    assert run.submit("b", trajectory(tasks[0], 0)).refused == {tasks[0].sample_id: "over: cancelled"}
    assert run.lease("a", 1, 0) == []
    assert run.batch(1).waiting_for == "nothing: the run is ending"
    assert run.get("trainer", FinishRun(reason="again"), RunFinished).ledger == ledger
    refusal = run.join("generator", "c")
    assert isinstance(refusal, Nack) and refusal.code == "run_ending"
    for name in ("a", "b", "trainer"):
        assert not run.broker.is_over(run.now)
        run.ask(name, Leave(reason="drained"))
    assert run.broker.is_over(run.now)  # the monitor need not leave
    run.take(run.broker.close(run.now))
    assert run.rows[-1].kind == "ledger"
    assert run.broker.status(run.now).state == "stopped"


def test_the_end_does_not_wait_for_ever() -> None:
    run = world(dead_after_s=1000)
    run.ask("trainer", FinishRun(reason=""))
    run.pass_time(9)
    assert not run.broker.is_over(run.now)
    run.pass_time(1)
    assert run.broker.is_over(run.now)


def test_draining_gives_out_nothing_new_but_takes_what_comes_back() -> None:
    run = world(dead_after_s=1000)
    tasks = run.lease("a", 8, 0)
    run.submit("a", *(trajectory(task, 0) for task in tasks[:4]))
    run.batch(1)
    run.ask("b", LeaseSamples(capacity=1, version=0, wait_s=9))
    run.take(run.broker.drain("signal", run.now))
    assert run.late["b"] == [SampleLeases(tasks=[])]
    assert run.submit("a", trajectory(tasks[4], 0)).accepted == 1
    assert run.commit(1).version == 1
    run.pushes.clear()
    run.beat("b")  # has not heard of it
    assert [name for name, _ in run.pushes] == ["b"]
    run.pass_time(8)
    assert run.broker.is_over(run.now)
    run.take(run.broker.close(run.now))
    ledger = run.pool.ledger.snapshot()
    assert (ledger.trained, ledger.ended, ledger.balance) == (4, {"cancelled": 4}, 0)
