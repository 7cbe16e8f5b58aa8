"""The trainer sees its next batch in advance: by all rules of its turn, and bound to nothing."""

from __future__ import annotations

import pytest
from fakes.broker_world import World, trajectory, world

from umbra.proto.messages import BatchLease, Leave, PeekBatch
from umbra.proto.messages import LeaseBatch as Lease
from umbra.services.buffer.policy.staleness import split


def peek(run: World, step: int, wait_s: float = 0.0) -> BatchLease | None:
    reply = run.ask("trainer", PeekBatch(step=step, wait_s=wait_s))
    assert reply is None or isinstance(reply, BatchLease)
    return reply


def lease(run: World, step: int, held: str) -> BatchLease:
    return run.get("trainer", Lease(step=step, wait_s=0, held=held), BatchLease)


def ids(batch: BatchLease) -> list[str]:
    return [made.sample_id for made in batch.trajectories]


def test_it_is_shown_when_it_would_be_full_and_not_sent_again() -> None:
    run = world(run_ahead=1)
    first = run.lease("a", 4, 0)
    second = run.lease("a", 4, 0)
    run.submit("a", *(trajectory(task, 0) for task in first))
    assert ids(run.batch(1)) == [task.sample_id for task in first]
    ledger = run.pool.ledger.snapshot()
    assert peek(run, 2, wait_s=60) is None
    assert run.pool.ledger.snapshot() == ledger
    run.submit("a", *(trajectory(task, 0) for task in second))
    (seen,) = run.late["trainer"]
    assert isinstance(seen, BatchLease)
    assert ids(seen) == [task.sample_id for task in second] and seen.digest
    assert list(run.broker.batches.formed) == [1], "a copy"
    run.commit(1)
    taken = lease(run, 2, seen.digest)
    assert taken.same and not taken.trajectories
    assert run.broker.batches.leased is not None
    assert run.broker.batches.leased.staleness.worst == split(0, 0, 1)[0] == 1
    assert run.batch(2).trajectories == seen.trajectories, "a trainer that holds nothing"
    run.commit(2)
    assert run.broker.counters["wrong_step"] == 0


def test_a_synchronous_run_has_nothing_to_show() -> None:
    """Spare groups are complete, but of the weights that the first batch was made with."""
    run = world(run_ahead=0, oversample=4)
    run.produce("a", 0)
    assert len(run.pool.complete) == 6
    run.batch(1)
    assert peek(run, 2, wait_s=60) is None
    run.commit(1)
    (reply,) = run.late["trainer"]
    assert isinstance(reply, BatchLease) and not reply.trajectories


def test_what_will_be_too_old_at_its_turn_is_not_shown() -> None:
    """The second batch takes the newer groups. The older ones would still do for it, but they will
    be two versions old at the turn of the third."""
    run = world(run_ahead=2, max_staleness=1, sampling="freshest")
    run.produce("a", 0)
    run.batch(1)
    run.commit(1)
    run.produce("a", 1)
    run.batch(2)
    old = list(run.pool.complete.values())
    assert len(old) == 2 and not any(run.broker.policy.is_stale(0, 1) for _ in old)
    assert peek(run, 3, wait_s=60) is None
    run.commit(2)
    assert run.pool.ledger.snapshot().ended == {"stale": 4}
    (reply,) = run.late["trainer"]
    assert isinstance(reply, BatchLease) and not reply.trajectories


def test_another_batch_is_sent_in_full() -> None:
    """Newer tokens are preferred, and some have come since the trainer looked."""
    run = world(run_ahead=2, max_staleness=3, sampling="freshest")
    first, second, third = (run.lease("a", 4, 0) for _ in range(3))
    run.submit("a", *(trajectory(task, 0) for task in first))
    run.batch(1)
    run.commit(1)
    run.submit("a", *(trajectory(task, 0) for task in second))
    run.batch(2)
    run.submit("a", *(trajectory(task, 0) for task in third))
    seen = peek(run, 3)
    assert seen is not None and ids(seen) == [task.sample_id for task in third]
    newer = run.produce("b", 1)
    run.commit(2)
    taken = lease(run, 3, seen.digest)
    assert not taken.same
    assert ids(taken) == [task.sample_id for task in newer[:4]]


def test_what_is_held_is_recognised_by_a_buffer_that_starts_again() -> None:
    run = world(run_ahead=1, durable=True)
    run.produce("a", 0)
    run.batch(1)
    seen = peek(run, 2)
    assert seen is not None and seen.trajectories
    run.restart_broker()
    again = peek(run, 2)
    assert again == seen
    run.commit(1)
    assert lease(run, 2, seen.digest).same


@pytest.mark.parametrize("step", [1, 2, 4, -1, 10**9])
def test_another_step_has_nothing_to_show(step: int) -> None:
    run = world(run_ahead=3)
    run.produce("a", 0)
    assert peek(run, 2) == BatchLease(step=2, trajectories=[], waiting_for="another question")
    run.batch(1)
    run.commit(1)
    run.batch(2)
    reply = peek(run, step, wait_s=60)
    assert reply is not None and not reply.trajectories


def test_there_is_none_after_the_last_step() -> None:
    run = world(run_ahead=3, steps=1)
    run.produce("a", 0)
    run.batch(1)
    assert peek(run, 2, wait_s=5) is None
    run.pass_time(6)
    assert len(run.late["trainer"]) == 1


def test_a_question_that_waits_is_given_up_with_its_trainer() -> None:
    run = world(run_ahead=1)
    tasks = run.lease("a", 8, 0)
    run.submit("a", *(trajectory(task, 0) for task in tasks[:4]))
    run.batch(1)
    assert peek(run, 2, wait_s=60) is None
    run.ask("trainer", Leave(reason="done"))
    run.submit("a", *(trajectory(task, 0) for task in tasks[4:]))
    assert run.late["trainer"] == []


def test_replayed_groups_cannot_be_foreseen() -> None:
    run = world(run_ahead=2, max_staleness=2, sampling="replay", replay_times=2)
    run.produce("a", 0)
    run.batch(1)
    assert peek(run, 2, wait_s=60) is None
