"""What the buffer counts, each by a run in which it happens: that counter, and no other."""

from __future__ import annotations

import math
from typing import Any

from fakes.broker_world import World, give_back, trajectory, world

from umbra.proto.messages import (
    CommitBatch,
    LeaseTasks,
    Leave,
    Ok,
    RenewLeases,
    ReturnedSample,
    ReturnTasks,
    SubmitResults,
    TaskLeases,
)
from umbra.proto.records import Score, Task
from umbra.services.buffer.store import MemoryStore


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


def test_members() -> None:
    run = world(dead_after_s=5, run_ahead=0)
    run.lease("a", 3, 0)
    run.ask("a", Ok())
    assert counted(run) == {"stray_replies": 1}
    run.join("generator", "a", "a-2")
    assert counted(run) == {"superseded": 1, "taken_back": 3}
    run.lease("b", 2, 0)
    run.ask("b", Leave(reason="done"))
    assert counted(run) == {"taken_back": 2}
    run.lease("a", 2, 0)
    run.pass_time(4)
    run.beat("trainer")
    run.pass_time(1.5)
    assert counted(run) == {"dead_members": 1, "taken_back": 2}


def test_a_restart() -> None:
    run = world(durable=True)
    run.produce("a", 0)
    run.batch(1)
    run.commit(1)
    before = counted(run)
    assert before == {"accepted": 8}
    run.restart_broker()
    assert run.broker.counters["restarts"] == 1


def test_failures() -> None:
    run = world(run_ahead=0, group_size=2, batch_groups=3)
    tasks = run.lease("a", 6, 0)
    by_group = {task.group_id: task for task in tasks}
    for task in list(by_group.values())[:2]:
        give_back(run, "a", returned(task, failed=True, reason="no server"))
    assert counted(run) == {"environment_failures": 2, "failed: no server": 2}


def test_cut_groups() -> None:
    run = world(group_size=4, batch_groups=1, run_ahead=0, straggler_s=10)
    tasks = run.lease("a", 4, 0)
    run.submit("a", *(trajectory(task, 0) for task in tasks[:2]))
    run.pass_time(11)
    assert counted(run) == {"accepted": 2, "stragglers_cut": 2}


def scoring(run: World, name: str, capacity: int = 9) -> list[Task]:
    """Return what `name` gets to score."""
    body = LeaseTasks(kind="reward", capacity=capacity, wait_s=0)
    return run.get(name, body, TaskLeases).tasks


def score(run: World, name: str, *scores: Score) -> dict[str, str]:
    """Deliver scores; those that are refused."""
    return run.get(name, SubmitResults(scores=list(scores)), TaskLeases).refused


def test_scores() -> None:
    run = world(stages=["reward"], run_ahead=0, lease_s=10, max_attempts=2)
    run.join("scorer", "r")
    for task in run.lease("a", 4, 0):
        run.submit("a", trajectory(task, 0))
    assert counted(run) == {"accepted": 4}
    first, second, third, fourth = scoring(run, "r")
    assert not score(run, "r", Score(sample_id=first.sample_id, attempt=1, reward=1.0))
    assert counted(run) == {"scored: reward": 1}
    assert score(run, "r", Score(sample_id=first.sample_id, attempt=1, reward=1.0))
    assert counted(run) == {"late_scores": 1}
    assert score(run, "r", Score(sample_id=second.sample_id, attempt=1, reward=math.nan))
    assert counted(run) == {"malformed_scores": 1, "scoring_retries": 1}
    run.pass_time(11)
    assert counted(run) == {"expired_leases": 2, "scoring_retries": 2}
    (again, *_) = scoring(run, "r", 1)
    assert not score(run, "r", Score(sample_id=again.sample_id, attempt=2, error="broken"))
    found = counted(run)
    assert found == {"scoring_retries": 1, "scoring_failures": 1, "failed: reward: broken": 1}
    assert {third.sample_id, fourth.sample_id, second.sample_id} >= {again.sample_id}


def test_steps() -> None:
    run = world(run_ahead=1, max_staleness=2, durable=True)
    run.produce("a", 0)
    for step in (1, 2):
        run.batch(step)
        run.ask("trainer", CommitBatch(step=step, metrics={"skipped": float(step == 2)}))
    assert counted(run) == {"accepted": 8, "batches_skipped": 1}
    run.commit(2)
    assert counted(run) == {"repeated_commits": 1}
    run.ask("trainer", CommitBatch(step=7))
    assert counted(run) == {"not_leased": 1}
    run.join("trainer", "trainer", "trainer-2")
    assert counted(run) == {"superseded": 1}
    assert run.batch(1).step == 1
    assert counted(run) == {"steps_repeated": 2}


def test_a_store_in_memory_knows_its_size() -> None:
    store = MemoryStore()
    for value, size in ((b"12345", 7), (b"1", 3), (b"", 2)):
        store.put("ab", value)
        assert store.size_bytes == size
    store.put("c", b"1")
    store.delete("ab")
    store.delete("never")
    assert store.size_bytes == 2


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
