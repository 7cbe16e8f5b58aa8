"""The generator's loop with a fake buffer, receiver and engine: leases, weights, drain."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
from fakes.engine import ScriptedEngine
from fakes.fixtures import Closes
from fakes.serving import FakeChannel
from fakes.trajectories import sample

from umbra.proto import messages as m
from umbra.proto.deadline import LEAST_RATE, Pace
from umbra.proto.errors import RejectedError, UmbraError, UsageError
from umbra.proto.messages import LeaseTasks, Message, TaskLeases
from umbra.proto.net.task_client import TaskClient
from umbra.proto.records import Manifest, Sampling, TensorEntry, Trajectory
from umbra.services.config import GeneratorConfig
from umbra.services.environments.built_in import ExactMatch
from umbra.services.environments.pool import EnvironmentPool, InlinePool
from umbra.services.environments.protocol import ParsedTurn
from umbra.services.generator import activity
from umbra.services.generator.activity import Activity, StallWatch
from umbra.services.generator.engines.engine import EngineError
from umbra.services.generator.loop import GeneratorLoop
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.process.files import read_jsonl
from umbra.services.process.metrics import MetricsFile
from umbra.services.weights.receiver import StagedVersion

STOP = 3
LEASE_S = 30.0


def fake_session() -> Mock:
    plain = {"stop_reason": "asked to", "failure": None, "doing": ("decoding", 0.0)}
    return Mock(stopping=threading.Event(), **plain)


@dataclass
class FakeReceiver:
    staged: StagedVersion | None = None
    answers: list[tuple[int, str]] = field(default_factory=list)
    failure: UmbraError | None = None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def poll(self) -> StagedVersion | None:
        staged, self.staged = self.staged, None
        return staged

    def load(
        self, staged: StagedVersion, apply: Callable[[StagedVersion], None], *_limits: Any
    ) -> StagedVersion:
        try:
            apply(staged)
        except UmbraError as error:
            self.answers.append((staged.version, str(error)))
            raise
        self.answers.append((staged.version, ""))
        return staged


def version(number: int) -> StagedVersion:
    entry = TensorEntry(name="w", dtype="F32", shape=[2], offset=0, nbytes=8)
    manifest = Manifest(tensors=[entry], buckets=[(0, 8)], total_bytes=8, digest="d")
    return StagedVersion(number, 1, manifest, memoryview(bytearray(8)))


class Bench:
    """A loop whose engine says "1", ten times, then ends."""

    def __init__(
        self, folder: Path, model: Path, pool: EnvironmentPool | None = None, **generator: Any
    ) -> None:
        tokenizer = load_tokenizer(model)
        one = tokenizer("1", add_special_tokens=False)["input_ids"]
        self.engine = ScriptedEngine(lambda ids: one if len(ids) < 13 else [STOP], version=-1)
        self.channel, self.session, self.receiver = FakeChannel(), fake_session(), FakeReceiver()
        self.now, self.wake = [1000.0], threading.Event()
        clock: Any = {"clock": lambda: self.now[0]}
        settings = RolloutSettings(Chat(tokenizer, {STOP}), Sampling(max_tokens=32), 256, **clock)
        self.path = folder / "metrics.jsonl"
        self.metrics = MetricsFile(self.path, "generator")
        self.loop = GeneratorLoop(
            session=self.session,
            receiver=cast(Any, self.receiver),
            buffer=TaskClient(cast(Any, self.channel), self.wake, **clock),
            runner=RolloutRunner(
                self.engine, pool or InlinePool(ExactMatch), settings, flush_tokens=4
            ),
            config=GeneratorConfig(slots=8, **generator),
            watch=StallWatch(self.session, "scripted", Pace(60.0, LEAST_RATE)),
            activity=Activity(self.metrics, **clock),
        )

    def close(self) -> None:
        self.metrics.close()

    @property
    def progress(self) -> str:
        return self.session.progress.call_args.args[0]

    def serve(self) -> None:
        self.receiver.staged = version(0)
        self.turns(1)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.now[0] += 0.01
            self.loop.turn()

    def lease(self, *names: str, attempt: int = 1, pinned: int = -1) -> LeaseTasks:
        row, same = {"prompt": "1", "answer": "1"}, {"attempt": attempt, "pinned_version": pinned}
        tasks = [sample(row, sample_id=n, group_id=n, prompt_id=n, **same) for n in names]
        return self.channel.answer(LeaseTasks, TaskLeases(tasks=tasks))

    def answers(
        self, replies: Mapping[Any, Message], other: Message, monkeypatch: Any
    ) -> list[Message]:
        """Answer whatever is open each time that the loop waits, as the buffer's thread would."""
        answered: list[Message] = []

        def wait(timeout: float | None = None) -> bool:
            while self.channel.open:
                kind = type(self.channel.open[0][0])
                answered.append(self.channel.answer(kind, replies.get(kind, other)))
            return True

        monkeypatch.setattr(self.wake, "wait", wait)
        return answered

    def spans(self, name: str) -> list[dict[str, Any]]:
        rows = read_jsonl(self.path)
        return [row for row in rows if row["kind"] == "span" and row["name"] == name]

    def made(self) -> list[Trajectory]:
        """Return what it has submitted so far."""
        return [t for body in self.channel.asked(m.SubmitResults) for t in body.trajectories]


@pytest.fixture
def opened(tmp_path: Path, tiny_model_dir: Path, closes: Closes) -> Callable[..., Bench]:
    return lambda **options: closes(Bench(tmp_path, tiny_model_dir, **options))


@pytest.fixture
def waiting(opened: Callable[..., Bench]) -> Bench:
    """A generator that waits for its first weights."""
    return opened()


@pytest.fixture
def bench(waiting: Bench) -> Bench:
    waiting.serve()
    return waiting


def test_nothing_is_leased_before_there_are_weights_and_then_some_ahead_of_the_slots(
    waiting: Bench,
) -> None:
    waiting.engine.slots = 1
    waiting.turns(3)
    assert not waiting.channel.open
    assert waiting.progress == "waiting for weights"
    waiting.serve()
    assert waiting.receiver.answers == [(0, "")]
    assert waiting.engine.loads == [(0, "keep")]
    assert waiting.progress == "waiting for samples"
    asked = waiting.lease("a", "b", "c")
    assert (asked.capacity, asked.version) == (1 + 2, 0), "slots, and generator.prefetch ahead"
    waiting.turns(3)
    assert not waiting.channel.asked(m.LeaseTasks), "all of them wait for a slot"
    waiting.engine.slots = 4
    waiting.turns(1)
    (asked,) = waiting.channel.asked(m.LeaseTasks)
    assert asked.capacity == 4 + 2 - 3


class NeverAnswers(InlinePool):
    def play(self, key: str, row: dict[str, Any], responses: Sequence[ParsedTurn | str]) -> None:
        if not responses:
            super().play(key, row, responses)


@pytest.mark.parametrize(("sessions", "most"), [(0, 4 * 4 + 2), (4, 4), (40, 40)])
def test_samples_that_wait_for_tools_take_no_slot(
    opened: Callable[..., Bench], sessions: int, most: int
) -> None:
    bench = opened(pool=NeverAnswers(ExactMatch), sessions=sessions)
    bench.serve()
    leased = 0
    for _ in range(40):
        while bench.channel.asked(m.LeaseTasks):
            (asked,) = bench.channel.asked(m.LeaseTasks)
            assert 0 < asked.capacity <= min(6, most - leased)
            bench.lease(*(f"s{leased + index}" for index in range(asked.capacity)))
            leased += asked.capacity
            bench.turns(1)
        bench.turns(15)  # all in the engine end their turns
    assert leased == most
    assert bench.engine.live == 0


def test_finished_samples_ask_for_others_in_their_place(bench: Bench) -> None:
    names = [f"s{number}" for number in range(bench.lease().capacity)]
    bench.turns(1)
    bench.lease(*names)
    bench.turns(1)
    assert not bench.channel.asked(m.LeaseTasks), "there is no room for more"
    while not bench.channel.asked(m.SubmitResults):
        bench.turns(1)
    assert not bench.channel.asked(m.LeaseTasks)
    row = {"prompt": "1", "answer": "1"}
    more = [sample(row, sample_id="more", group_id="more", prompt_id="more")]
    done = bench.channel.answer(m.SubmitResults, m.TaskLeases(accepted=1, tasks=more))
    assert (done.capacity, done.version) == (len(done.trajectories), 0)
    bench.turns(30)
    assert "more" in {t.sample_id for t in bench.made()}


def test_policy_drain_ends_samples_on_the_old_weights(opened: Callable[..., Bench]) -> None:
    """Scenario: new weights come while samples are under way, and an open question is answered.

    Result: those under way end on the old weights, what came after goes back, then they are loaded.
    """
    bench = opened(kv_policy="drain")
    bench.serve()
    bench.lease("a", "b")
    bench.turns(2)
    bench.receiver.staged = version(1)
    bench.turns(1)
    bench.lease("c")
    bench.turns(3)
    assert bench.engine.version == 0
    (returned,) = bench.channel.asked(m.ReturnTasks)
    assert [(s.sample_id, s.failed) for s in returned.samples] == [("c", False)]
    assert not bench.channel.asked(m.LeaseTasks)
    bench.turns(12)
    assert {span.version for t in bench.made() for span in t.spans} == {0}
    assert (bench.engine.version, bench.receiver.answers[-1]) == (1, (1, ""))
    assert [question.version for question in bench.channel.asked(m.LeaseTasks)] == [1]


def test_leases_are_renewed_until_the_buffer_has_the_result(bench: Bench) -> None:
    bench.lease("a", attempt=4)
    bench.turns(2)
    assert not bench.channel.asked(m.RenewLeases)
    bench.now[0] += LEASE_S / 3
    bench.turns(1)
    assert bench.channel.answer(m.RenewLeases, m.TaskLeases(lost=[])).leases == [("a", 4)]
    bench.turns(15)
    while bench.channel.asked(m.RenewLeases):
        assert bench.channel.answer(m.RenewLeases, m.TaskLeases()).partials
    assert bench.channel.asked(m.SubmitResults)
    bench.now[0] += LEASE_S / 3
    bench.turns(1)
    assert bench.channel.answer(m.RenewLeases, m.TaskLeases(lost=[])).leases == [("a", 4)]
    bench.channel.answer(m.SubmitResults, m.TaskLeases(accepted=1))
    bench.now[0] += LEASE_S / 3
    bench.turns(2)
    assert not bench.channel.asked(m.RenewLeases)


@pytest.mark.parametrize("again", [False, True])
def test_a_lost_lease_is_given_up_and_one_won_again_is_kept(bench: Bench, again: bool) -> None:
    """A sample may return under a newer attempt before the loss of the old one is read."""
    bench.lease("a", "b")
    bench.turns(2)
    bench.now[0] += LEASE_S
    bench.turns(1)
    if again:
        bench.lease("a", attempt=2)
    bench.channel.answer(m.RenewLeases, m.TaskLeases(lost=["a"]))
    bench.turns(15)
    found = {(t.sample_id, t.attempt) for t in bench.made()}
    assert found == {("b", 1)} | ({("a", 2)} if again else set())


def test_weights_change_under_way(bench: Bench) -> None:
    bench.lease("a")
    bench.turns(5)
    bench.receiver.staged = version(1)
    bench.now[0] += 2.0  # the next turn begins another span
    bench.turns(12)
    assert [span.version for span in bench.made()[0].spans] == [0, 1]
    assert [row["version"] for row in bench.spans("load_weights")] == [0, 1]
    spans = bench.spans("decode")
    assert len(spans) > 1
    assert sum(span["tokens"] for span in spans) == bench.engine.decoded_tokens == 11


def test_weights_that_do_not_fit_are_reported_and_end_the_loop(
    waiting: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise UsageError("the weights do not fit")

    monkeypatch.setattr(waiting.engine, "load", refuse)
    waiting.receiver.staged = version(0)
    with pytest.raises(UsageError):
        waiting.turns(1)
    assert waiting.receiver.answers == [(0, "the weights do not fit")]


def test_a_failed_sample_is_returned_with_its_reason(bench: Bench) -> None:
    bench.channel.answer(m.LeaseTasks, m.TaskLeases(tasks=[sample({}, sample_id="a")]))
    bench.turns(2)
    (returned,) = bench.channel.answer(m.ReturnTasks, m.Ok()).samples
    assert returned.failed
    assert (returned.sample_id, bool(returned.reason)) == ("a", True)
    assert bench.session.emit.call_args.args == ("sample_failed",)


def test_a_drain_hands_back_even_what_is_late(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.lease("a", "b")
    bench.turns(4)
    late = m.TaskLeases(tasks=[sample({}, sample_id="late")])
    answered = bench.answers({m.ReturnTasks: m.Ok()}, late, monkeypatch)
    bench.session.stopping.set()
    bench.loop.run()
    returned = [s for body in answered if isinstance(body, m.ReturnTasks) for s in body.samples]
    assert [r.sample_id for r in returned] == ["a", "b", "late"]
    assert {(r.reason, r.failed) for r in returned} == {("asked to", False)}
    assert [r.partial and r.partial.response_tokens for r in returned[:2]] == [4, 4]
    assert returned[2].partial is None
    assert not bench.engine.busy


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (EngineError("the engine is gone"), "the engine is gone"),
        (KeyError(7), "the generator failed: KeyError: 7"),
    ],
)
def test_a_broken_engine_ends_the_loop_once_all_that_was_finished_is_delivered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    bench.lease("a")
    bench.turns(4)
    bench.lease("b")
    poll = bench.engine.poll

    def breaks(timeout_s: float) -> Any:
        if not any(name == "a" for name in bench.engine._live):
            raise error
        return poll(timeout_s)

    monkeypatch.setattr(bench.engine, "poll", breaks)
    accepted = {m.SubmitResults: m.TaskLeases(accepted=1)}
    answered = bench.answers(accepted, m.TaskLeases(), monkeypatch)
    with pytest.raises(EngineError, match=said):
        bench.loop.run()
    delivered = [
        t for body in answered if isinstance(body, m.SubmitResults) for t in body.trajectories
    ]
    assert [t.sample_id for t in delivered] == ["a"]


def test_interrupted_samples_come_back_as_partials(bench: Bench) -> None:
    bench.lease("a", "b")
    bench.turns(4)
    bench.channel.pushes.put(m.Interrupt(leases=[("a", 1), ("b", 9), ("x", 1)], reason="why"))
    bench.turns(2)
    (returned,) = bench.channel.asked(m.ReturnTasks)
    (sample,) = returned.samples
    assert (sample.sample_id, sample.reason, sample.failed) == ("a", "why", False)
    assert sample.partial.response_tokens == 4
    bench.turns(12)
    assert [t.sample_id for t in bench.made()] == ["b"]


def test_new_weights_wait_for_pinned_samples(bench: Bench) -> None:
    """Those come even with the answer that is read in the turn in which the weights are there."""
    bench.lease("a", "b", pinned=0)
    bench.receiver.staged = version(1)
    bench.turns(4)
    bench.lease("c", pinned=7)
    bench.turns(1)
    (returned,) = bench.channel.asked(m.ReturnTasks)
    assert [s.sample_id for s in returned.samples] == ["c"]
    bench.turns(12)
    versions = {t.sample_id: [span.version for span in t.spans] for t in bench.made()}
    assert versions == {"a": [0], "b": [0]}
    assert not bench.channel.asked(m.RenewLeases)
    assert bench.engine.version == 1


def test_a_lost_evaluation_holds_up_no_weights(bench: Bench) -> None:
    bench.lease("a", pinned=0)
    bench.turns(2)
    bench.receiver.staged = version(1)
    bench.now[0] += LEASE_S
    bench.turns(1)
    bench.channel.answer(m.RenewLeases, m.TaskLeases(lost=["a"]))
    bench.turns(2)
    assert bench.engine.version == 1


def test_no_sample_is_ever_ahead_of_its_partial_by_more_than_is_flushed(bench: Bench) -> None:
    saved: dict[str, int] = {}
    for turn in range(60):
        if turn % 3 == 0 and bench.channel.asked(m.LeaseTasks):
            bench.lease(f"s{turn}")
        bench.turns(1)
        while bench.channel.asked(m.RenewLeases):
            for t in bench.channel.answer(m.RenewLeases, m.TaskLeases(lost=[])).partials:
                saved[t.sample_id] = t.response_tokens
                assert t.finish_reason == "partial"
                assert [(s.version, s.start, s.end) for s in t.spans] == [(0, 0, len(t.loss_mask))]
        everything = bench.engine.peek(bench.engine._live)
        assert all(len(o.token_ids) - saved.get(o.request_id, 0) < 4 for o in everything)
    assert len(saved) > 5
    assert {t.response_tokens for t in bench.made()} == {11}  # flushing took nothing away


def test_a_turn_without_token_is_no_progress(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.lease("a")
    bench.turns(2)
    assert bench.progress == "decoding"
    monkeypatch.setattr(bench.engine, "poll", lambda _timeout_s: [])
    bench.session.reset_mock()
    bench.turns(5)
    assert bench.session.waits.call_args_list == [call("decoding")] * 5
    assert not bench.session.progress.called


def test_the_loop_ends_when_the_buffer_refuses_it_or_the_receiver_has_failed(bench: Bench) -> None:
    """Also while an evaluation wants no other weights than those that are served."""
    bench.lease("a", pinned=0)
    bench.turns(1)
    bench.receiver.failure = UmbraError("the receiver of weights failed: KeyError: 7")
    with pytest.raises(UmbraError, match="the receiver of weights failed"):
        bench.turns(1)
    bench.receiver.failure = None
    bench.turns(1)
    bench.channel.answer(m.LeaseTasks, RejectedError("not a member", code="unknown_member"))
    with pytest.raises(RejectedError, match="not a member"):
        bench.turns(1)


@pytest.mark.parametrize(
    ("moved_at", "loads_s", "stuck_s"),
    [
        ([0.0] * 99, 0, 0),
        ([0.0] * 99 + [1e6] * 100, 0, 0),
        ([0.0] * 50 + [60.0] * 101, 0, 100),
        ([0.0] * 149, 50, 0),
        ([0.0] * 150, 50, 150),
    ],
)
def test_an_engine_that_makes_no_token_for_long_leaves_the_run_and_ends(
    monkeypatch: pytest.MonkeyPatch, moved_at: list[float], loads_s: int, stuck_s: int
) -> None:
    """Looks are counted, as of a stopped process there are none; a load may take longer."""
    session, found = fake_session(), list[str]()

    def end(error: UmbraError) -> None:
        assert isinstance(error, EngineError)
        found.extend([*session.leave.call_args.args, f"failed: {error}"])

    monkeypatch.setattr(activity, "end_process", end)
    watch = StallWatch(session, "vllm", Pace(100.0, LEAST_RATE))
    watch.loading = int(loads_s * LEAST_RATE)
    left = iter(moved_at)

    def wait(timeout_s: float) -> bool:
        """Let one look's time pass, until none is left."""
        assert timeout_s == 1.0
        moved = next(left, None)
        session.doing = ("decoding", moved or 0.0)
        return moved is None

    monkeypatch.setattr(watch, "_closing", Mock(wait=wait))
    with watch.watching():
        pass
    said = f"failed: the vllm engine is stuck: no token for {stuck_s} s while it was decoding"
    assert found == ([f"{said} (100 s = 10 x buffer.stall_s)"] * 2 if stuck_s else [])
