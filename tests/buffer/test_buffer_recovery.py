"""The buffer is killed and starts again, at any moment: nothing is lost, nothing is repeated."""

from collections import Counter
from operator import attrgetter
from typing import Any

import msgspec
import pytest
from fakes.broker_world import World, trajectory, world

from umbra.proto import messages as m
from umbra.proto.errors import UsageError
from umbra.proto.records import EvalReport
from umbra.services.buffer.samples.evaluation import OpenEvaluation
from umbra.services.buffer.samples.staleness import StalenessStats
from umbra.services.buffer.state import SURVIVING, pack_run, unpack_run
from umbra.services.buffer.store import StoreError


def started(**buffer: Any) -> World:
    return world(durable=True, **buffer)


def test_members_and_leases_outlive_the_buffer() -> None:
    world = started()
    tasks = world.lease("a", 3, 0)
    world.restart_broker()
    held = [(task.sample_id, task.attempt) for task in tasks]
    renewed = world.get("a", m.RenewLeases(leases=held), m.TaskLeases)
    assert renewed.lost == []
    assert world.submit("a", *(trajectory(task, 0) for task in tasks)).accepted == 3
    assert world.submit("a", trajectory(tasks[0], 0)).accepted == 1  # its ack was lost
    assert world.pool.ledger.in_flight["ready"] == 3
    world.restart_broker()
    assert isinstance(world.join("generator", "a", "a-2", replaces=0), m.Welcome), "not heard since"


def test_a_copied_folder_of_a_run_has_a_name_of_its_own() -> None:
    """Its store went with it; a store that is elsewhere may be another run's by a mistake."""
    for inside in (True, False):
        world = started(**({} if inside else {"store": "/elsewhere"}))
        tasks = world.lease("a", 3, 0)
        world.run_id = "copied"
        if not inside:
            with pytest.raises(UsageError, match="is of a run with run_id = run-1, this one has"):
                world.restart_broker()
            continue
        for _ in range(2):
            world.restart_broker()
        assert world.status.run_id == "copied"
        assert world.submit("a", *(trajectory(task, 0) for task in tasks)).accepted == 3


def test_what_an_earlier_life_did_is_no_speed_of_this_one() -> None:
    """Rates of 7,798 to 11,528 samples/s were shown after a resume, where 420 were made."""
    world = started()
    world.steps("a", 1)
    world.restart_broker()
    world.pass_time(1.0)
    rates = world.status.rates
    assert rates.samples_per_s == rates.issued_per_s == rates.steps_per_s == 0.0


def test_a_holder_that_did_not_outlive_it_loses_its_leases() -> None:
    world = started()
    world.join("generator", "b")
    tasks = world.lease("a", 8, 0)
    world.restart_broker()
    world.pass_time(10)
    world.beat("b")
    world.pass_time(10)
    again = world.lease("b", 8, 0)
    assert {t.sample_id for t in again} == {t.sample_id for t in tasks}
    assert all(t.attempt == 2 for t in again)


def test_no_prompt_is_skipped_or_repeated() -> None:
    """Also where spare groups, and those that were dropped as stale, were not trained."""
    world = started(run_ahead=2, max_staleness=2, oversample=2)
    tasks = world.lease("a", 100, 0)
    world.answer("a", tasks, 0)
    for step in (1, 2, 3):
        world.train(step)
    assert world.pool.ledger.ended["stale"] == 4
    seen = [task.prompt_id for task in [*tasks, *world.lease("a", 4, 3)]]
    world.restart_broker()
    seen += [task.prompt_id for task in world.lease("a", 100, 3)]
    assert list(dict.fromkeys(seen)) == [str(n) for n in range(1, len(seen) // 2 + 1)]


def test_a_trainer_that_starts_again_gets_the_same_batches_in_order() -> None:
    world = started()
    batches = world.steps("a", 1, 2, 3, 4, 5)
    world.get("trainer", m.CheckpointSaved(step=2), m.Ok)
    world.produce("a", 5)
    batches.append(world.batch(6))  # formed, but never committed
    for kill in (False, True):
        if kill:
            world.restart_broker()
        world.join("trainer", "trainer", f"trainer-{2 + kill}")
        assert world.batch(3) == batches[2]
        assert world.broker.batches.version == 2
        assert world.broker.counters["steps_repeated"] == 3 * (1 + kill)
        ledger = world.pool.ledger.snapshot()
        assert (ledger.trained, ledger.in_flight["training"], ledger.balance) == (8, 16, 0)
        for step in (3, 4, 5, 6):
            assert world.batch(step) == batches[step - 1]
            if step < 6:
                world.commit(step)
    world.commit(6)
    assert world.pool.ledger.snapshot().trained == 24


def test_what_a_checkpoint_covers_cannot_be_repeated_and_takes_no_room() -> None:
    world = started(run_ahead=0)
    world.steps("a", 1, 2, 3)
    assert len(world.store.keys("t/")) == 12
    world.get("trainer", m.CheckpointSaved(step=2), m.Ok)
    assert len(world.store.keys("t/")) == 4
    for step, incarnation in ((3, "trainer-1"), (2, "trainer-2")):  # the same one never goes back
        world.join("trainer", "trainer", incarnation)
        assert isinstance(world.ask("trainer", m.LeaseBatch(step=step, wait_s=0)), m.Nack)
    assert len(world.batch(3).trajectories) == 4


def test_generators_may_be_newer_than_a_trainer_that_started_again() -> None:
    world = started()
    world.steps("a", 1, 2, 3)
    world.join("trainer", "trainer", "trainer-2")
    world.batch(1)
    assert world.broker.batches.version == 0
    tasks = world.lease("a", 8, 3)
    assert not world.submit("a", *(trajectory(task, 3) for task in tasks)).refused


def other(value: Any) -> Any:
    """Return another value of the same type."""
    match value:
        case None:
            return 5
        case Counter():
            return Counter({**value, "made up": 3})
        case int():
            return value + 5
        case str():
            return value + "x"
        case dict():
            return {name: (seen + 2, seen + 3) for name, (_, seen) in value.items()}
        case list():
            return [*value, EvalReport(version=4, done=True, samples=2)]
        case tuple():
            return (2, 7)
        case StalenessStats():
            return StalenessStats(worst=1, counts=[6, 3])
        case _:
            raise NotImplementedError(value)


def test_all_that_is_kept_of_a_run_is_put_back() -> None:
    run = World(run_ahead=4).broker.run
    for path in SURVIVING:
        place, _, last = path.rpartition(".")
        owner = attrgetter(place)(run) if place else run
        before = getattr(owner, last)
        made = {"open": OpenEvaluation(3, 8, {"failed": 1}, 3), "routers": (2, 1, 4)}
        setattr(owner, last, made.get(last) or other(before))
    kept = pack_run(run)
    fresh = World(run_ahead=4).broker.run
    assert pack_run(fresh) != kept
    unpack_run(kept, fresh)
    assert pack_run(fresh) == kept


def test_counts_of_another_kind_are_refused_in_a_sentence() -> None:
    world = started()
    world.store.put("now", msgspec.msgpack.encode({"version": "three"}))
    with pytest.raises(StoreError, match=r"cannot be read .*: begin a new run"):
        world.restart_broker()


def test_a_finished_run_goes_on_when_it_gets_more_steps() -> None:
    world = World(steps=1, durable=True)
    world.join("trainer", "trainer")
    world.join("generator", "a")
    world.steps("a", 1)
    world.get("trainer", m.FinishRun(reason="done"), m.RunFinished)
    world.restart_broker()
    assert world.broker.run.state == "draining"
    more = msgspec.structs.replace(world.config.run, steps=2)
    world.config = msgspec.structs.replace(world.config, run=more)
    world.restart_broker()
    assert world.broker.run.state == "ready"
    assert not world.broker.run.finished
    world.join("trainer", "trainer", incarnation="again")
    world.join("generator", "a", incarnation="again")
    world.produce("a", 1)
    assert world.batch(2).step == 2
    world.restart_broker()
    assert world.broker.run.state == "ready"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["r/g-0"], "the prompt of group g-0 is gone"),
        (["g/g-0"], "the state of group g-0 is gone"),
        (["g/g-0", "r/g-0"], "2 samples are unaccounted for"),
        (["g/g-2", "r/g-2"], "group g-2 of the batch of step 1 is gone"),
        (["t/s-4"], "the trajectory of sample s-4, or a score of it, is gone"),
    ],
)
def test_a_store_with_a_gap_is_refused(keys: list[str], words: str) -> None:
    """Also in a committed batch, which is kept for a trainer that starts again before its step."""
    run = started(run_ahead=3)
    tasks = run.lease("a", 8, 0)
    run.answer("a", tasks[4:], 0)
    run.batch(1)
    if "trajectory" in words:
        run.commit(1)
    for key in keys:
        run.store.delete(key)
    with pytest.raises(StoreError, match=words):
        run.restart_broker()
