"""Sampling "replay": groups are trained on again while they are fresh, B = 2 groups of 2."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.broker_world import World, trajectory

from umbra.proto.errors import UsageError
from umbra.proto.messages import BatchLease, CheckpointSaved, Ok
from umbra.services.config import BufferConfig, RunConfig
from umbra.services.config.feasibility import check_feasible, implied_staleness


def started(**options: Any) -> World:
    settings: dict[str, Any] = {
        "durable": True,
        "sampling": "replay",
        "replay_times": 3,
        "run_ahead": 3,
        "max_staleness": 2,
    }
    world = World(**settings | options)
    world.join("generator", "a")
    world.join("trainer", "trainer")
    return world


def make_groups(world: World, count: int, version: int) -> None:
    """`count` new groups with tokens of `version`."""
    tasks = world.lease("a", 2 * count, version)
    assert len(tasks) == 2 * count
    assert not world.submit("a", *(trajectory(task, version) for task in tasks)).refused


def step(world: World, number: int) -> list[str]:
    """Train one batch; its groups."""
    batch = world.batch(number)
    assert batch.trajectories, batch.waiting_for
    ledger = world.commit(number).ledger
    assert ledger.balance == 0
    return groups(batch)


def groups(batch: BatchLease) -> list[str]:
    return list(dict.fromkeys(t.group_id for t in batch.trajectories))


def test_what_is_missing_is_made_up_for_by_groups_of_before() -> None:
    world = started()
    make_groups(world, 2, 0)
    assert step(world, 1) == ["g-0", "g-1"]
    assert not world.batch(2).trajectories  # none is new
    make_groups(world, 1, 0)
    assert step(world, 2) == ["g-2", "g-0"]
    make_groups(world, 1, 0)
    assert step(world, 3) == ["g-3", "g-1"]  # used once, g-0 twice
    ledger = world.pool.ledger.snapshot()
    assert (ledger.trained, ledger.replayed, ledger.balance) == (8, 4, 0)
    rows = [row.fields["replayed_groups"] for row in world.rows if row.kind == "batch"]
    assert rows == [0, 1, 1]


def test_new_groups_come_first() -> None:
    world = started()
    make_groups(world, 4, 0)
    assert [step(world, 1), step(world, 2)] == [["g-0", "g-1"], ["g-2", "g-3"]]
    assert world.pool.ledger.replayed == 0


def test_the_bound_holds_for_every_use() -> None:
    world = started(max_staleness=1)
    make_groups(world, 3, 0)
    assert step(world, 1) == ["g-0", "g-1"]
    make_groups(world, 1, 1)
    assert step(world, 2) == ["g-2", "g-3"]
    make_groups(world, 1, 1)
    assert step(world, 3) == ["g-4", "g-3"]  # at version 2 those of version 0 are too old
    assert world.broker.batches.trained.worst == 1
    assert set(world.broker.batches.replays.groups) == set()  # at version 3, all are


def test_no_group_is_used_more_often_than_allowed() -> None:
    world = started(replay_times=2, max_staleness=5, batch_groups=1)
    make_groups(world, 1, 0)
    step(world, 1)
    assert not world.batch(2).trajectories  # one new group in two
    world = started(replay_times=2, max_staleness=5)
    seen: list[str] = []
    for number in range(1, 6):
        make_groups(world, 2 if number == 1 else 1, 0)
        seen += step(world, number)
    assert max(seen.count(name) for name in seen) == 2
    assert len(seen) == 10


def test_a_batch_that_is_full_by_tokens_needs_as_many_new_groups() -> None:
    """Four groups fill it; each may be in two batches, so two of them have to be new."""
    world = started(replay_times=2, max_staleness=5, batch_groups=6, batch_tokens=16)
    make_groups(world, 4, 0)
    assert len(step(world, 1)) == 4
    make_groups(world, 1, 0)
    assert not world.batch(2).trajectories, "one new group in four"
    make_groups(world, 1, 0)
    assert step(world, 2) == ["g-4", "g-5", "g-0", "g-1"]


@pytest.mark.parametrize("durable", [True, False])
def test_trajectories_are_kept_as_long_as_they_are_needed(durable: bool) -> None:
    world = started(durable=durable, max_staleness=1)
    for number in (1, 2, 3):
        make_groups(world, 2 if number == 1 else 1, number - 1)
        step(world, number)
    if durable:
        assert len(world.store.keys("t/")) == 8
        world.get("trainer", CheckpointSaved(step=3), Ok)
    live = world.broker.batches.replays.groups
    assert set(live) == {"g-3"}
    assert sorted(world.store.keys("t/")) == ["t/s-6", "t/s-7"]
    assert world.store.keys("b/") == [] and world.store.keys("p/") == ["p/g-3"]


def test_trajectories_that_a_later_batch_replays_outlive_the_first() -> None:
    """g-0 is used up in step 2; the checkpoint covers step 1 alone, so step 2 may come again."""
    world = started(replay_times=2, max_staleness=4)
    make_groups(world, 2, 0)
    step(world, 1)
    make_groups(world, 1, 0)
    batch = world.batch(2)
    assert step(world, 2) == ["g-2", "g-0"]
    world.get("trainer", CheckpointSaved(step=1), Ok)
    assert {"t/s-0", "t/s-1"} <= set(world.store.keys("t/"))
    world.restart_broker()
    world.join("trainer", "trainer", "trainer-2")
    assert world.batch(2) == batch


@pytest.mark.parametrize("kills", [0, 1, 2])
def test_a_trainer_that_starts_again_gets_the_same_batches(kills: int) -> None:
    """The checkpoint covers step 1, whose groups are replayed in the steps that are lost."""
    world = started(replay_times=3, max_staleness=4)
    batches: list[BatchLease] = []
    for number in range(1, 5):
        make_groups(world, 2 if number == 1 else 1, 0)
        batches.append(world.batch(number))
        step(world, number)
    world.get("trainer", CheckpointSaved(step=1), Ok)
    make_groups(world, 1, 0)
    batches.append(world.batch(5))  # formed, not committed
    before = world.pool.ledger.snapshot()
    assert (before.trained, before.replayed) == (10, 6)
    if kills:
        world.restart_broker()
    world.join("trainer", "trainer", "trainer-2")
    assert world.batch(2) == batches[1]
    ledger = world.pool.ledger.snapshot()
    assert (ledger.trained, ledger.replayed, ledger.balance) == (4, 0, 0)
    for number in range(2, 6):
        if kills == 2:
            world.restart_broker()
        assert world.batch(number) == batches[number - 1]
        step(world, number)
        if number == 4:
            assert world.pool.ledger.snapshot() == before
    uses = [name for batch in batches for name in groups(batch)]
    held = world.broker.batches.replays.groups
    assert {name: len(group.steps) for name, group in held.items()} == {
        name: uses.count(name) for name in held
    }


def test_the_end_of_the_run_cancels_what_is_new_alone() -> None:
    world = started()
    make_groups(world, 2, 0)
    step(world, 1)
    make_groups(world, 1, 0)
    assert groups(world.batch(2)) == ["g-2", "g-0"]
    world.take(world.broker.close(world.now))
    ledger = world.pool.ledger.snapshot()
    assert (ledger.trained, ledger.ended, ledger.balance) == (4, {"cancelled": 2}, 0)


def test_the_check_of_a_configuration_knows_replay() -> None:
    def config(**buffer: Any) -> RunConfig:
        return RunConfig(buffer=BufferConfig(sampling="replay", **buffer))

    with pytest.raises(UsageError, match=r"buffer.sampling = replay"):
        check_feasible(config(run_ahead=0))
    with pytest.raises(UsageError, match=r"buffer.replay_times = 5"):
        check_feasible(config(replay_times=5, max_staleness=2))
    good = config(run_ahead=1, max_staleness=3, replay_times=2)
    check_feasible(good)
    assert implied_staleness(good).typical == 2
    assert "trained on up to 2 times" in implied_staleness(good).describe()
