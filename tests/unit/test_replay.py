"""The replay engine: its speed model, its made-up tokens, and how a model is fitted to a run."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from umbra.proto.errors import UsageError
from umbra.proto.records import Manifest, Sampling, VersionSpan
from umbra.services.generator.command import replay_model
from umbra.services.generator.engines.engine import EngineOutput, EngineRequest
from umbra.services.generator.replay_engine import ReplayEngine, ReplayTokens
from umbra.services.generator.replay_fit import fit
from umbra.services.generator.replay_model import ReplayDecoder, ReplayModel, read_replay_model

FILLER, STOP, VOCABULARY = 5, 3, 50
MODEL = ReplayModel(
    step_s=0.010, token_s=0.001, prompt_token_s=0.0001, pause_s=0.5, lengths=[10, 20]
)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


NOTHING = Manifest(tensors=[], buckets=[], total_bytes=0, digest="")


def make_engine(clock: Clock, model: ReplayModel = MODEL, **changes: Any) -> ReplayEngine:
    settings: dict[str, Any] = {"slots": 4, "max_context": 64, "version": 0, **changes}
    return ReplayEngine(
        model,
        ReplayTokens(VOCABULARY, FILLER, STOP),
        clock=clock,
        wait=clock.wait,
        **settings,
    )


def request(name: str, prompt: Iterable[int] = (7, 8, 9), most: int = 60) -> EngineRequest:
    return EngineRequest(name, list(prompt), Sampling(), most)


def finish(engine: ReplayEngine) -> dict[str, EngineOutput]:
    outputs: dict[str, EngineOutput] = {}
    while engine.busy:
        outputs |= {output.request_id: output for output in engine.poll(1.0)}
    return outputs


# -- speed ----------------------------------------------------------------------------------------


def test_a_step_costs_more_with_more_rows_and_with_prompts_to_read() -> None:
    decoder = ReplayDecoder(MODEL, slots=2)
    for name, tokens in (("a", 10), ("b", 20), ("c", 5)):
        decoder.submit(name, 100, tokens, now=0.0)
    # Ten steps of two rows and 200 prompt tokens; then "c" takes the free slot, with its prompt.
    first = 10 * 0.012 + 0.02
    assert decoder.next_at() == pytest.approx(first)
    assert decoder.advance(first - 0.001) == []
    assert decoder.made("b") == 9
    assert decoder.advance(first) == ["a"]
    second = first + 5 * 0.012 + 0.01
    assert decoder.advance(second) == ["c"]
    assert decoder.made("b") == 15
    assert decoder.next_at() == pytest.approx(second + 5 * 0.011)
    assert decoder.advance(1e9) == ["b"]
    assert (decoder.tokens, decoder.next_at()) == (35, None)


def test_a_request_waits_for_the_step_under_way() -> None:
    decoder = ReplayDecoder(ReplayModel(step_s=1.0, lengths=[1]), slots=2)
    decoder.submit("a", 1, 3, now=0.0)
    decoder.submit("b", 1, 1, now=1.5)
    assert decoder.advance(2.9) == []
    assert (decoder.made("a"), decoder.made("b")) == (2, 0)
    assert decoder.advance(3.0) == ["a", "b"]


def test_a_pause_delays_what_is_live_and_not_what_comes_after() -> None:
    decoder = ReplayDecoder(ReplayModel(step_s=1.0, lengths=[1]), slots=2)
    decoder.submit("a", 1, 3, now=0.0)
    decoder.advance(1.0)
    decoder.pause(5.0, now=1.0)
    assert decoder.next_at() == 8.0
    assert decoder.advance(8.0) == ["a"]
    decoder.pause(2.0, now=10.0)
    decoder.submit("b", 1, 1, now=11.0)
    assert decoder.next_at() == 13.0
    decoder.submit("c", 1, 1, now=20.0)
    assert decoder.advance(13.0) == ["b"]
    assert decoder.next_at() == 21.0


@given(
    sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=20),
    slots=st.integers(1, 5),
    looks=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30),
)
def test_how_often_it_is_looked_at_changes_nothing(
    sizes: list[tuple[int, int]], slots: int, looks: list[float]
) -> None:
    """Scenario: once advanced to the end, once in any number of pieces. Result: the same order."""
    decoders = [ReplayDecoder(MODEL, slots) for _ in range(2)]
    for index, (prompt, new) in enumerate(sizes):
        for decoder in decoders:
            decoder.submit(str(index), prompt, new, now=0.0)
    whole = decoders[0].advance(1e6)
    pieces: list[str] = []
    now = 0.0
    for look in looks:
        now += look
        pieces += decoders[1].advance(now)
    assert pieces + decoders[1].advance(1e6) == whole
    assert decoders[1].tokens == decoders[0].tokens == sum(new for _, new in sizes)


# -- the engine -----------------------------------------------------------------------------------


def test_tokens_logprobs_and_lengths_are_made_up_from_the_model() -> None:
    engine = make_engine(Clock())
    engine.submit([request(f"r{i}") for i in range(40)])
    assert engine.free == 0
    outputs = finish(engine)
    lengths = [len(output.token_ids) for output in outputs.values()]
    assert min(lengths) >= 10 and max(lengths) <= 20 and len(set(lengths)) > 4
    assert engine.decoded_tokens == sum(lengths)
    for output in outputs.values():
        count = len(output.token_ids)
        assert output.token_ids == [FILLER] * (count - 1) + [STOP]
        assert output.logprobs == [pytest.approx(-math.log(VOCABULARY))] * count
        assert output.spans == [VersionSpan(version=0, start=0, end=count)]
        assert output.finish_reason == "stop"


def test_limits_of_request_and_context_cut_a_reply_off() -> None:
    engine = make_engine(Clock(), max_context=12)
    engine.submit([request("short", most=4), request("context")])
    outputs = finish(engine)
    assert {name: len(o.token_ids) for name, o in outputs.items()} == {"short": 4, "context": 9}
    assert {o.finish_reason for o in outputs.values()} == {"length"}
    assert all(STOP not in o.token_ids for o in outputs.values())


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.1, 0.13])
def test_an_interrupted_reply_gets_no_longer_elsewhere(after_s: float) -> None:
    whole = make_engine(Clock())
    whole.submit([request("r")])
    expected = finish(whole)["r"]
    clock = Clock()
    first, second = make_engine(clock), make_engine(clock, version=1)
    first.submit([request("r")])
    clock.wait(after_s)
    (part,) = first.abort()
    assert part.finish_reason == "abort" and not first.busy
    second.submit([request("r", [7, 8, 9, *part.token_ids])])
    rest = finish(second)["r"]
    assert part.token_ids + rest.token_ids == expected.token_ids


def test_nothing_is_decoded_while_buckets_come() -> None:
    """Scenario: weights are loaded from where they come from, which takes two seconds.

    Result: what is live has as many tokens afterwards as before.
    """
    clock = Clock()
    engine = make_engine(clock)
    engine.submit([request("r", [7] * 30)])
    clock.wait(0.1)
    made = 8  # a step of one row takes 11 ms, the first 14

    def parts() -> Iterable[memoryview]:
        for _ in range(2):
            clock.wait(1.0)
            yield memoryview(b"")

    assert engine.load(NOTHING, parts(), 1, "keep") == []
    assert engine.peek({"r": made}) and engine.peek({"r": made + 1}) == []
    assert finish(engine)["r"].spans[0] == VersionSpan(version=0, start=0, end=made)


@pytest.mark.parametrize("policy", ["keep", "recompute", "abort"])
def test_new_weights_pause_it_and_change_the_version_of_what_follows(policy: Any) -> None:
    clock = Clock()
    engine = make_engine(clock)
    engine.submit([request("r", [7] * 30)])
    clock.wait(0.1)
    assert engine.poll(0.0) == []
    before = clock.now
    aborted = engine.load(NOTHING, (), 1, policy)
    assert clock.now == pytest.approx(before + 0.5)
    made = 8  # a step of one row takes 11 ms, the first 14
    if policy == "abort":
        assert [(o.request_id, len(o.token_ids)) for o in aborted] == [("r", made)]
        assert not engine.busy
        return
    (seen,) = engine.peek({"r": 1})
    assert seen.spans == [VersionSpan(version=0, start=0, end=made)]
    assert engine.peek({"r": made + 1}) == []
    output = finish(engine)["r"]
    count = len(output.token_ids)
    assert output.spans == [
        VersionSpan(version=0, start=0, end=made),
        VersionSpan(version=1, start=made, end=count),
    ]
    reread = 0.0001 * (30 + made) if policy == "recompute" else 0.0
    assert clock.now == pytest.approx(100.0 + 0.003 + 0.5 + reread + count * 0.011)


def test_a_simulator_can_leap_from_event_to_event() -> None:
    """Scenario: `wait` does nothing, the clock is set to `next_at`. Each leap ends something."""
    clock = Clock(0.0)
    engine = ReplayEngine(
        MODEL,
        ReplayTokens(VOCABULARY, FILLER, STOP),
        slots=64,
        max_context=64,
        clock=clock,
        wait=lambda _: None,
    )
    engine.submit([request(f"r{i}") for i in range(500)])
    polls, done = 0, 0
    while (at := engine.next_at()) is not None:
        clock.now = at
        outputs = engine.poll(0.0)
        assert outputs
        polls, done = polls + 1, done + len(outputs)
    assert done == 500 >= polls
    assert clock.now > 100 * MODEL.step_s


# -- fitting --------------------------------------------------------------------------------------


def spans(model: ReplayModel, count: int) -> list[dict[str, Any]]:
    """Decode spans as a generator that is exactly as fast as `model` would write them."""
    rows: list[dict[str, Any]] = []
    at = 1000.0
    for index in range(count):
        steps, live, read = 50 + index % 7, 10 + 13 * index % 37, 100 * (index % 5)
        tokens = steps * live
        spent = model.step_s * steps + model.token_s * tokens + model.prompt_token_s * read
        row = {"kind": "span", "name": "decode", "service": "g", "start": at, "end": at + spent}
        work = {"steps": steps, "tokens": tokens, "prompt_tokens": read, "lengths": [index + 1]}
        rows.append({**row, **work})
        at += spent
    return rows


def test_a_fit_finds_the_model_that_made_the_rows() -> None:
    rows = spans(MODEL, 30)
    # Weights were loaded within the third span, which took longer for it.
    load = {"start": rows[2]["start"] + 0.001, "end": rows[2]["start"] + 0.021}
    rows[2]["end"] += 0.02
    rows.append({"kind": "span", "name": "load_weights", "service": "g", **load})
    model = fit(rows, "here")
    assert model.step_s == pytest.approx(MODEL.step_s, rel=1e-3)
    assert model.token_s == pytest.approx(MODEL.token_s, rel=1e-3)
    assert model.prompt_token_s == pytest.approx(MODEL.prompt_token_s, rel=1e-3)
    assert model.pause_s == pytest.approx(0.02)
    assert (model.lengths[0], model.lengths[50], model.lengths[-1]) == (1, 15.5, 30)
    assert model.error == pytest.approx(0.0, abs=1e-6)


def test_no_cost_is_negative() -> None:
    rows = spans(ReplayModel(step_s=0.01, lengths=[1]), 30)
    for row in rows:
        row["end"] -= 1e-7 * row["prompt_tokens"]
    model = fit(rows, "here")
    assert model.token_s >= 0 and model.prompt_token_s == 0


def test_a_file_from_a_run(tmp_path: Path) -> None:
    lines = [json.dumps(row, separators=(",", ":")) for row in spans(MODEL, 30)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "deep" / "replay.json"
    done = CliRunner().invoke(replay_model, [str(tmp_path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "a step takes 10 ms, 1e+03 us more per sequence" in done.output
    assert read_replay_model(out).source == str(tmp_path)


def test_too_little_to_fit_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="7 spans of decoding and 7 turns are too few"):
        fit(spans(MODEL, 7), "here")
    done = CliRunner().invoke(replay_model, [str(tmp_path), "--out", "x"])
    assert isinstance(done.exception, UsageError) and "no metrics.jsonl" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "no replay model"),
        ('{"step_s": 0, "lengths": [1]}', "step_s"),
        ('{"step_s": 1, "lengths": []}', "lengths"),
        ('{"step_s": 1, "lengths": [2, 1]}', "must not fall"),
        ('{"step_s": 1, "lengths": [1], "step": 2}', "step"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "replay.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=part):
        read_replay_model(file)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json cannot be read"):
        read_replay_model(tmp_path / "none.json")
    with pytest.raises(UsageError, match="umbra replay-model RUN --out FILE"):
        read_replay_model("")


def test_the_file_says_what_the_model_says(tmp_path: Path) -> None:
    file = tmp_path / "replay.json"
    file.write_bytes(msgspec.json.encode(MODEL))
    assert read_replay_model(file) == MODEL
    assert [MODEL.length(share) for share in (0.0, 0.5, 1.0)] == [10, 15, 20]
