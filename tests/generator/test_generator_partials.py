"""The generator's loop with a fake buffer: partials, interrupts and pinned samples."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.loop_bench import (
    LEASE_S,
    Bench,
    open_bench,
    version,
)

from umbra.proto.messages import (
    Interrupt,
    LeaseTasks,
    RenewLeases,
    ReturnTasks,
    SubmitResults,
    TaskLeases,
)


@pytest.fixture
def bench(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Bench]:
    with open_bench(tmp_path, tiny_model_dir) as opened:
        yield opened


def test_what_there_is_of_a_sample_is_flushed_while_it_goes_on(bench: Bench) -> None:
    bench.serve()
    bench.lease("a")
    bench.turns(12)
    first, second = bench.channel.asked(RenewLeases)
    assert [t.response_tokens for t in (*first.partials, *second.partials)] == [4, 8]
    assert first.partials[0].finish_reason == "partial"
    assert [(s.version, s.start, s.end) for s in first.partials[0].spans] == [(0, 0, 4)]
    bench.turns(3)
    (submitted,) = bench.channel.asked(SubmitResults)
    assert submitted.trajectories[0].response_tokens == 11  # flushing took nothing away


def test_interrupted_samples_come_back_as_partials(bench: Bench) -> None:
    bench.serve()
    bench.lease("a", "b")
    bench.turns(4)
    bench.channel.pushes.put(Interrupt(leases=[("a", 1), ("b", 9), ("x", 1)], reason="why"))
    bench.turns(2)
    (returned,) = bench.channel.asked(ReturnTasks)
    (sample,) = returned.samples
    assert (sample.sample_id, sample.reason, sample.failed) == ("a", "why", False)
    assert sample.partial.response_tokens == 4
    bench.turns(12)
    (submitted,) = bench.channel.asked(SubmitResults)
    assert [t.sample_id for t in submitted.trajectories] == ["b"]


def test_new_weights_wait_for_pinned_samples(bench: Bench) -> None:
    """Those come even with the answer that is read in the turn in which the weights are there."""
    bench.serve()
    bench.lease("a", "b", pinned=0)
    bench.receiver.staged = version(1)
    bench.turns(4)
    bench.lease("c", pinned=7)
    bench.turns(1)
    (returned,) = bench.channel.asked(ReturnTasks)
    assert [s.sample_id for s in returned.samples] == ["c"]
    bench.turns(12)
    made = [t for s in bench.channel.asked(SubmitResults) for t in s.trajectories]
    assert [(t.sample_id, [span.version for span in t.spans]) for t in made] == [
        ("a", [0]), ("b", [0]),
    ]  # fmt: skip
    assert not bench.channel.asked(RenewLeases)
    assert bench.engine.version == 1


def test_a_lost_evaluation_holds_up_no_weights(bench: Bench) -> None:
    bench.serve()
    bench.lease("a", pinned=0)
    bench.turns(2)
    bench.receiver.staged = version(1)
    bench.now[0] += LEASE_S
    bench.turns(1)
    bench.channel.answer(RenewLeases, TaskLeases(lost=["a"]))
    bench.turns(2)
    assert bench.engine.version == 1


def test_no_sample_is_ever_ahead_of_its_partial_by_more_than_is_flushed(bench: Bench) -> None:
    bench.serve()
    saved: dict[str, int] = {}
    for turn in range(60):
        if turn % 3 == 0 and bench.channel.asked(LeaseTasks):
            bench.lease(f"s{turn}")
        bench.turns(1)
        while bench.channel.asked(RenewLeases):
            for t in bench.channel.answer(RenewLeases, TaskLeases(lost=[])).partials:
                saved[t.sample_id] = t.response_tokens
        everything = bench.engine.peek(bench.engine._live)
        assert all(len(o.token_ids) - saved.get(o.request_id, 0) < 4 for o in everything)
    assert len(saved) > 5
