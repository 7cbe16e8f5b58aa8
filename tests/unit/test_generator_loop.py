"""The generator's loop with a fake buffer, receiver and engine: leases, weights, drain."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.engine import ScriptedEngine
from fakes.loop_bench import (
    LEASE_S,
    STOP,
    Bench,
    FakeChannel,
    FakeReceiver,
    FakeSession,
    version,
)

from umbra.proto.errors import DeadlineError, RejectedError, UsageError
from umbra.proto.messages import (
    FlushPartials,
    Interrupt,
    LeaseSamples,
    Ok,
    RenewAck,
    RenewLeases,
    ReturnSamples,
    SampleLeases,
    SubmitAck,
    SubmitTrajectories,
)
from umbra.proto.records import SampleTask, Sampling
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.single_turn import ExactMatch
from umbra.services.generator.buffer_client import BufferClient
from umbra.services.generator.engine import EngineError
from umbra.services.generator.loop import GeneratorLoop
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.generator.showcase import Showcase
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer
from umbra.services.runtime.metrics import MetricsFile


@pytest.fixture
def bench(tmp_path: Path, tiny_model_dir: Path) -> Iterator[Bench]:
    tokenizer = load_tokenizer(tiny_model_dir)
    one = tokenizer("1", add_special_tokens=False)["input_ids"]
    # Says "1", ten times, then ends.
    engine = ScriptedEngine(lambda ids: one if len(ids) < 13 else [STOP], version=-1, slots=4)
    channel, session, receiver, now = FakeChannel(), FakeSession(), FakeReceiver(), [1000.0]
    wake = threading.Event()
    metrics = MetricsFile(tmp_path / "metrics.jsonl", "generator")
    settings = RolloutSettings(
        Chat(tokenizer, {STOP}), Sampling(max_tokens=32), 256, clock=lambda: now[0]
    )
    loop = GeneratorLoop(
        session=cast(Any, session),
        receiver=cast(Any, receiver),
        buffer=BufferClient(cast(Any, channel), wake, clock=lambda: now[0]),
        engine=engine,
        runner=RolloutRunner(engine, InlinePool(ExactMatch), settings, flush_tokens=4),
        metrics=metrics,
        kv_policy="keep",
        prefetch=2,
        wake=wake,
        showcase=Showcase(metrics, settings.chat, clock=lambda: now[0]),
        clock=lambda: now[0],
    )
    yield Bench(channel, session, receiver, engine, loop, tmp_path / "metrics.jsonl", now)
    metrics.close()


def serve(bench: Bench) -> None:
    bench.receiver.staged = version(0)
    bench.turns(1)


def test_nothing_is_leased_before_there_are_weights(bench: Bench) -> None:
    bench.turns(3)
    assert not bench.channel.open
    assert bench.session.activities[-1] == "waiting for weights"
    serve(bench)
    assert bench.receiver.answers == [(0, "")]
    assert [load[:2] for load in bench.engine.loads] == [(0, "keep")]
    (asked,) = bench.channel.asked(LeaseSamples)
    assert (asked.capacity, asked.version) == (6, 0)
    assert bench.session.activities[-1] == "waiting for samples"


def test_samples_become_trajectories(bench: Bench) -> None:
    serve(bench)
    bench.lease("a", "b")
    bench.turns(2)
    (asked,) = bench.channel.asked(LeaseSamples)
    assert asked.capacity == 4
    bench.turns(12)
    (submitted,) = bench.channel.asked(SubmitTrajectories)
    assert [t.sample_id for t in submitted.trajectories] == ["a", "b"]
    assert {t.response_tokens for t in submitted.trajectories} == {11}


def test_one_question_at_a_time_but_a_new_one_for_new_weights(bench: Bench) -> None:
    serve(bench)
    bench.turns(3)
    assert len(bench.channel.asked(LeaseSamples)) == 1
    bench.receiver.staged = version(1)
    bench.turns(3)
    assert [q.version for q in bench.channel.asked(LeaseSamples)] == [0, 1]


def test_leases_are_renewed_until_the_buffer_has_the_result(bench: Bench) -> None:
    serve(bench)
    bench.lease("a", attempt=4)
    bench.turns(2)
    assert not bench.channel.asked(RenewLeases)
    bench.now[0] += LEASE_S / 3
    bench.turns(1)
    assert bench.channel.answer(RenewLeases, RenewAck(lost=[])).leases == [("a", 4)]
    bench.turns(15)
    assert bench.channel.asked(SubmitTrajectories)
    bench.now[0] += LEASE_S / 3
    bench.turns(1)
    assert bench.channel.answer(RenewLeases, RenewAck(lost=[])).leases == [("a", 4)]
    bench.channel.answer(SubmitTrajectories, SubmitAck(accepted=1))
    bench.now[0] += LEASE_S / 3
    bench.turns(2)
    assert not bench.channel.asked(RenewLeases)


def test_a_lost_lease_is_given_up(bench: Bench) -> None:
    serve(bench)
    bench.lease("a", "b")
    bench.turns(2)
    bench.now[0] += LEASE_S
    bench.turns(1)
    bench.channel.answer(RenewLeases, RenewAck(lost=["a"]))
    bench.turns(15)
    (submitted,) = bench.channel.asked(SubmitTrajectories)
    assert [t.sample_id for t in submitted.trajectories] == ["b"]


def test_a_lease_lost_and_won_again_is_kept(bench: Bench) -> None:
    """Scenario: the sample returns under a newer attempt before the loss of the old one is read."""
    serve(bench)
    bench.lease("a")
    bench.turns(2)
    bench.now[0] += LEASE_S
    bench.turns(1)
    bench.lease("a", attempt=2)
    bench.channel.answer(RenewLeases, RenewAck(lost=["a"]))
    bench.turns(15)
    (submitted,) = bench.channel.asked(SubmitTrajectories)
    assert [(t.sample_id, t.attempt) for t in submitted.trajectories] == [("a", 2)]


def test_unanswered_questions_for_work_are_repeated(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    serve(bench)
    with caplog.at_level(logging.WARNING):
        bench.channel.answer(LeaseSamples, DeadlineError("no answer from buffer"))
        bench.turns(2)
    assert "no answer from buffer" in caplog.text
    assert len(bench.channel.asked(LeaseSamples)) == 1


def test_a_refusal_ends_the_loop(bench: Bench) -> None:
    serve(bench)
    bench.channel.answer(LeaseSamples, RejectedError("not a member", code="unknown_member"))
    with pytest.raises(RejectedError, match="not a member"):
        bench.turns(1)


def test_weights_change_under_way(bench: Bench) -> None:
    serve(bench)
    bench.lease("a")
    bench.turns(5)
    bench.receiver.staged = version(1)
    bench.turns(12)
    (submitted,) = bench.channel.asked(SubmitTrajectories)
    spans = submitted.trajectories[0].spans
    assert [span.version for span in spans] == [0, 1]
    assert [row["version"] for row in bench.spans("load_weights")] == [0, 1]


def test_weights_that_do_not_fit_are_reported_and_end_the_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise UsageError("the weights do not fit")

    monkeypatch.setattr(bench.engine, "load_weights", refuse)
    bench.receiver.staged = version(0)
    with pytest.raises(UsageError):
        bench.turns(1)
    assert bench.receiver.answers == [(0, "the weights do not fit")]


def test_a_failed_sample_is_returned_with_its_reason(bench: Bench) -> None:
    serve(bench)
    task = SampleTask(
        sample_id="a", group_id="g", prompt_id="p", attempt=1, row={}, lease_s=LEASE_S
    )
    bench.channel.answer(LeaseSamples, SampleLeases(tasks=[task]))
    bench.turns(2)
    (returned,) = bench.channel.answer(ReturnSamples, Ok()).samples
    assert returned.failed
    assert (returned.sample_id, bool(returned.reason)) == ("a", True)
    assert "sample_failed" in bench.session.events


def test_drain_hands_back_partials_and_what_comes_late(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(bench)
    bench.lease("a", "b")
    bench.turns(4)
    late = SampleTask(
        sample_id="late", group_id="g", prompt_id="p", attempt=1, row={}, lease_s=LEASE_S
    )
    returned: list[Any] = []

    def buffer(timeout: float | None = None) -> bool:
        """Stands for the buffer's thread: answers whatever is open."""
        del timeout
        while bench.channel.open:
            body, _ = bench.channel.open[0]
            if isinstance(body, ReturnSamples):
                returned.extend(bench.channel.answer(ReturnSamples, Ok()).samples)
            else:
                bench.channel.answer(type(body), SampleLeases(tasks=[late]))
        return True

    monkeypatch.setattr(bench.loop._wake, "wait", buffer)
    bench.session.stopping.set()
    bench.loop.run()
    assert [(r.sample_id, r.reason, r.failed) for r in returned] == [
        ("a", "asked to", False),
        ("b", "asked to", False),
        ("late", "asked to", False),
    ]
    assert [r.partial.response_tokens for r in returned[:2]] == [4, 4]
    assert returned[2].partial is None
    assert not bench.engine.busy


def test_a_failed_session_ends_the_loop_without_a_drain(bench: Bench) -> None:
    bench.session.failure = DeadlineError("the broker is silent")
    bench.session.stopping.set()
    bench.loop.run()
    assert not bench.channel.open


def test_spans_and_figures_show_what_the_loop_does(bench: Bench) -> None:
    bench.turns(5)
    serve(bench)
    bench.turns(5)
    bench.lease("a")
    bench.turns(20)
    bench.now[0] += 1.0
    bench.turns(1)
    reasons = [row["reason"] for row in bench.spans("idle")]
    assert reasons[:2] == ["weights", "work"]
    (decode,) = bench.spans("decode")
    assert (decode["tokens"], decode["lengths"]) == (11, [11])
    assert (decode["steps"], decode["prompt_tokens"]) == (11, 3)
    assert decode["start"] < decode["end"]
    assert bench.session.figures["finished"] == 1
    assert bench.session.figures["version"] == 0


# -- partials --------------------------------------------------------------------------------------


def test_what_there_is_of_a_sample_is_flushed_while_it_goes_on(bench: Bench) -> None:
    serve(bench)
    bench.lease("a")
    bench.turns(12)
    first, second = bench.channel.asked(FlushPartials)
    assert [t.response_tokens for t in (*first.partials, *second.partials)] == [4, 8]
    assert first.partials[0].finish_reason == "partial"
    assert [(s.version, s.start, s.end) for s in first.partials[0].spans] == [(0, 0, 4)]
    bench.turns(3)
    (submitted,) = bench.channel.asked(SubmitTrajectories)
    assert submitted.trajectories[0].response_tokens == 11  # flushing took nothing away


def test_a_lease_that_is_lost_when_it_is_flushed_is_given_up(bench: Bench) -> None:
    serve(bench)
    bench.lease("a")
    bench.turns(6)
    bench.channel.answer(FlushPartials, RenewAck(lost=["a"]))
    bench.turns(15)
    assert not bench.channel.asked(SubmitTrajectories)


def test_interrupted_samples_come_back_as_partials(bench: Bench) -> None:
    serve(bench)
    bench.lease("a", "b")
    bench.turns(4)
    bench.channel.pushes.put(Interrupt(leases=[("a", 1), ("b", 9), ("x", 1)], reason="why"))
    bench.turns(2)
    (returned,) = bench.channel.asked(ReturnSamples)
    (sample,) = returned.samples
    assert (sample.sample_id, sample.reason, sample.failed) == ("a", "why", False)
    assert sample.partial.response_tokens == 4
    bench.turns(12)
    (submitted,) = bench.channel.asked(SubmitTrajectories)
    assert [t.sample_id for t in submitted.trajectories] == ["b"]


def test_new_weights_wait_for_pinned_samples(bench: Bench) -> None:
    """Those come even with the answer that is read in the turn in which the weights are there."""
    serve(bench)
    bench.lease("a", "b", pinned=0)
    bench.receiver.staged = version(1)
    bench.turns(4)
    bench.lease("c", pinned=7)
    bench.turns(1)
    (returned,) = bench.channel.asked(ReturnSamples)
    assert [s.sample_id for s in returned.samples] == ["c"]
    bench.turns(12)
    made = [t for s in bench.channel.asked(SubmitTrajectories) for t in s.trajectories]
    assert [(t.sample_id, [span.version for span in t.spans]) for t in made] == [
        ("a", [0]), ("b", [0]),
    ]  # fmt: skip
    assert not bench.channel.asked(FlushPartials)
    assert bench.engine.version == 1


def test_new_weights_wait_while_more_pinned_samples_are_to_be_had(bench: Bench) -> None:
    serve(bench)
    bench.channel.answer(LeaseSamples, SampleLeases(tasks=[], more_pinned=True))
    bench.receiver.staged = version(1)
    bench.turns(3)
    assert bench.engine.version == 0
    bench.channel.answer(LeaseSamples, SampleLeases(tasks=[]))
    bench.turns(2)
    assert bench.engine.version == 1


def test_a_lost_evaluation_holds_up_no_weights(bench: Bench) -> None:
    serve(bench)
    bench.lease("a", pinned=0)
    bench.turns(2)
    bench.receiver.staged = version(1)
    bench.now[0] += LEASE_S
    bench.turns(1)
    bench.channel.answer(RenewLeases, RenewAck(lost=["a"]))
    bench.turns(2)
    assert bench.engine.version == 1


def test_no_sample_is_ever_ahead_of_its_partial_by_more_than_is_flushed(bench: Bench) -> None:
    serve(bench)
    saved: dict[str, int] = {}
    for turn in range(60):
        if turn % 3 == 0 and bench.channel.asked(LeaseSamples):
            bench.lease(f"s{turn}")
        bench.turns(1)
        while bench.channel.asked(FlushPartials):
            for t in bench.channel.answer(FlushPartials, RenewAck(lost=[])).partials:
                saved[t.sample_id] = t.response_tokens
        everything = bench.engine.peek(dict.fromkeys(bench.engine._live, 0))
        assert all(len(o.token_ids) - saved.get(o.request_id, 0) < 4 for o in everything)
    assert len(saved) > 5


# -- an engine that breaks -------------------------------------------------------------------------


def test_a_broken_engine_ends_the_loop_once_all_that_was_finished_is_delivered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(bench)
    bench.lease("a")
    bench.turns(4)
    bench.lease("b")
    poll = bench.engine.poll

    def breaks(timeout_s: float) -> Any:
        if not any(name == "a" for name in bench.engine._live):
            raise EngineError("the engine is gone")
        return poll(timeout_s)

    def buffer(timeout: float | None = None) -> bool:
        del timeout
        while bench.channel.open:
            kind = type(bench.channel.open[0][0])
            if kind is SubmitTrajectories:
                body = bench.channel.answer(kind, SubmitAck(accepted=1))
                delivered.extend(t.sample_id for t in body.trajectories)
            else:
                bench.channel.answer(kind, SampleLeases(tasks=[]))
        return True

    delivered: list[str] = []
    monkeypatch.setattr(bench.engine, "poll", breaks)
    monkeypatch.setattr(bench.loop._wake, "wait", buffer)
    with pytest.raises(EngineError, match="the engine is gone"):
        bench.loop.run()
    assert delivered == ["a"]
