"""A hub dies without a word and another takes its place: what trainer and receivers make of it."""

import pytest
from fakes.hub_bench import (
    LAYOUT,
    WAIT_S,
    Bench,
    content,
    load,
    publish,
    publish_slot,
    push,
    take,
    whole,
)

from umbra.proto.errors import RejectedError
from umbra.services.weights.arena import Arena
from umbra.services.weights.publisher import Publisher
from umbra.services.weights.receiver import Receiver


def receiver_of(bench: Bench) -> Receiver:
    """One that looks after its hub once a minute: it has to hear that there is another."""
    return bench.receiver("a", check_s=60.0)


def replace(bench: Bench, slots: int = 2) -> None:
    bench.start(slots=slots)
    for channel in bench.channels:
        channel.move(bench.endpoint)


@pytest.mark.parametrize("slots", [2, 3])
def test_an_arena_that_is_gone_is_written_again(bench: Bench, slots: int) -> None:
    """Removed by somebody, or of another number of slots: the trainer copies what it has."""
    bench.start(slots=2)
    publisher, receiver = bench.publisher(), receiver_of(bench)
    push(publisher, 0, receiver)
    path = bench.kill()
    if slots == 2:
        path.unlink()
    replace(bench, slots)
    load(receiver, 0)
    assert not path.exists()
    push(publisher, 1, receiver)


@pytest.mark.parametrize("arena_stays", [True, False])
def test_what_is_being_written_is_published_to_the_new_hub(bench: Bench, arena_stays: bool) -> None:
    bench.start()
    publisher, receiver = bench.publisher(), receiver_of(bench)
    push(publisher, 0, receiver)
    slot = publisher.slot(1, WAIT_S)
    path = bench.kill()
    if not arena_stays:
        path.unlink()
    replace(bench)
    slot[:] = content(1)
    publish_slot(publisher, 1)
    load(receiver, 1)  # version 0 may come first: pushed before the trainer was done
    assert publisher._arena is not None and (publisher._arena.path == path) == arena_stays
    push(publisher, 2, receiver)


def test_a_trainer_that_comes_back_after_the_hub_starts_afresh(bench: Bench) -> None:
    bench.start()
    publish(bench.publisher(), 5)
    path = bench.kill()
    bench.start()
    again = bench.publisher()
    assert not path.exists(), "nobody has it any more"
    publish(again, 0)
    staged = take(receiver_of(bench))
    assert (staged.version, whole(staged)) == (0, content(0))


def test_only_an_arena_of_the_run_whose_hub_is_dead_is_taken_over(
    bench: Bench, run_id: str
) -> None:
    bench.start()
    bench.publisher()
    arena = bench.hub._arena
    assert arena is not None
    for run, path in (
        (run_id, arena.path),  # its hub lives
        ("another", arena.path),
        (run_id, f"/dev/shm/umbra-{run_id}-nothing"),
    ):
        with pytest.raises(Exception, match=r"holds|no arena of run|cannot open"):
            Arena.adopt(run, path, slot_bytes=LAYOUT.total_bytes)


def test_a_trainer_that_was_replaced_does_not_come_back(bench: Bench) -> None:
    bench.start()
    old = bench.publisher()
    publish(old, 0)
    newer = Publisher(bench.channel("trainer-2"), LAYOUT)
    newer.register(WAIT_S)
    with pytest.raises(RejectedError, match="trainer-2 has registered since trainer did"):
        old.slot(1, WAIT_S)
    newer.close()
