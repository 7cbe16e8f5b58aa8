"""What the buffer counts, each by a run in which it happens: that counter, and no other."""

from __future__ import annotations

from typing import Any

from fakes.broker_world import World, give_back, trajectory, world

from umbra.proto.messages import (
    Ok,
    RenewLeases,
    ReturnedSample,
    ReturnTasks,
    TaskLeases,
)
from umbra.proto.records import Task


def counted(run: World) -> dict[str, int]:
    """Return what was counted since the last call."""
    found = {name: value for name, value in run.broker.counters.items() if value}
    run.broker.counters.clear()
    return found


def returned(task: Task, **changes: Any) -> ReturnedSample:
    """Return `task` handed back."""
    return ReturnedSample(**{"sample_id": task.sample_id, "attempt": 1, "reason": "x", **changes})


def test_answers() -> None:
    run = world(run_ahead=0, lease_s=10)
    first, second, third, fourth = run.lease("a", 4, 0)
    run.submit("a", trajectory(first, 0))
    assert counted(run) == {"accepted": 1}
    run.submit("a", trajectory(first, 0), trajectory(first, 0))
    assert counted(run) == {"duplicate_submits": 2}
    give_back(run, "a", returned(second))
    give_back(run, "a", returned(second))
    assert counted(run) == {"returned": 1, "late_returns": 1}
    flush = RenewLeases(partials=[trajectory(third, 0), trajectory(second, 0)])
    assert run.get("a", flush, TaskLeases).lost == [second.sample_id]
    assert counted(run) == {"flushed": 1, "late_flushes": 1}
    strange = trajectory(third, 0, group_id="another")
    assert run.get("a", RenewLeases(partials=[strange]), TaskLeases).lost == []
    assert counted(run) == {"flushed": 1, "malformed_partial": 1}
    run.pass_time(11)
    assert counted(run) == {"expired_leases": 2}
    run.submit("a", trajectory(fourth, 0))
    assert counted(run) == {"late_accepted": 1, "accepted": 1}
    refused = run.submit("b", trajectory(second, 0, attempt=2), trajectory(fourth, 0, attempt=2))
    assert len(refused.refused) == 2
    assert counted(run) == {"wrong_attempt": 2}
    run.submit("b", trajectory(second, 0, sample_id="never"))
    assert counted(run) == {"unknown_sample": 1}


def test_batches_go_while_no_checkpoint_could_use_them() -> None:
    run = world(run_ahead=1, max_staleness=2, durable=True)
    run.produce("a", 0)
    for step in (1, 2):
        run.batch(step)
        run.commit(step)
    assert len(run.broker.batches.archive.steps) == 2
    counted(run)
    run.store.size_bytes = 2 * run.config.buffer.store_max_bytes
    for left in (1, 0):
        run.pass_time(0.1)
        assert len(run.broker.batches.archive.steps) == left
        assert counted(run) == {"batches_let_go": 1}
    run.pass_time(0.1)
    assert counted(run) == {"store_full": 1}


def test_a_store_that_is_full() -> None:
    run = world(run_ahead=1)
    run.broker.room.full("no space left")
    run.pass_time(0.1)
    run.pass_time(0.1)
    assert counted(run) == {"store_full": 1}
    assert run.lease("a", 4, 0) == []
    run.broker.room.full("")
    run.pass_time(0.1)
    assert run.lease("a", 4, 0)
    assert counted(run) == {}
    give_nothing = ReturnTasks(samples=[])
    assert run.ask("a", give_nothing) == Ok()
    assert counted(run) == {}
