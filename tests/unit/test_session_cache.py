"""What the torch engine keeps of a session between its turns, and how much of it fits."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.sessions import Session, differences
from fakes.versions import finish, load, other_weights, request

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling
from umbra.services.config.loader import load_config
from umbra.services.generator.engine import EngineOutput, EngineRequest
from umbra.services.generator.engines import open_engine
from umbra.services.generator.lengths import RecentLengths
from umbra.services.generator.slots import SlotCache, cache_tokens
from umbra.services.generator.torch_engine import TorchEngine
from umbra.services.modeling.models import load_model

CPU = torch.device("cpu")
CONTEXT = 128
CLOSE = 1e-4


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    return load_model(tiny_model_dir, CPU, torch.float32)


def engine_of(model: Any, **values: Any) -> TorchEngine:
    settings = {"slots": 4, "max_context": CONTEXT, "version": 0, **values}
    return TorchEngine(model, stop_ids=(), **settings)


PROMPT = list(range(10, 22))


def test_a_session_reads_only_what_is_new_from_its_third_turn_on(model: Any) -> None:
    engine, session = engine_of(model), Session("a", PROMPT)
    cached = [session.turn(engine) for _ in range(5)]
    # All but the last token said; nothing is kept of a first turn, which mostly is the only one.
    prompts = [prompt for prompt, _ in session.turns]
    assert cached == [0, 0, *(prompt + 6 - 1 for prompt in prompts[1:4])]
    assert engine.cache.asked_tokens == sum(prompts)
    assert differences({0: model}, session, {}) < CLOSE


def test_a_session_keeps_what_older_weights_read_and_no_other_session_has_it(model: Any) -> None:
    models = {0: copy.deepcopy(model), 1: other_weights(model, 1)}
    engine, session, other = engine_of(model), Session("a", PROMPT), Session("b", PROMPT)
    session.turn(engine)
    session.turn(engine)
    kept = len(session.tokens) - 1
    load(engine, models[1].named_parameters(), 1)
    assert session.turn(engine) == kept
    assert [output.spans[0].version for _, output in session.turns] == [0, 0, 1]
    assert differences(models, session, {2: kept}) < CLOSE
    assert differences(models, session, {}) > 0.01, "or the line above would tell nothing"
    # It begins as the other did, and is read by the new weights alone.
    for _ in range(3):
        other.turn(engine)
    assert differences({1: models[1]}, other, {}) < CLOSE


@pytest.mark.parametrize("policy", ["recompute", "abort"])
def test_other_policies_keep_nothing_over_new_weights(model: Any, policy: str) -> None:
    models = {0: copy.deepcopy(model), 1: other_weights(model, 1)}
    engine, session = engine_of(model), Session("a", PROMPT)
    session.turn(engine)
    session.turn(engine)
    load(engine, models[1].named_parameters(), 1, policy)
    assert session.turn(engine) == 0
    assert differences(models, session, {}) < CLOSE


def test_a_session_that_is_over_leaves_nothing(model: Any) -> None:
    engine, session = engine_of(model), Session("a", PROMPT)
    for _ in range(3):
        session.turn(engine)
    engine.forget("a")
    assert session.turn(engine) == 0


def test_a_turn_that_was_cut_or_told_otherwise_is_kept_as_far_as_it_goes(model: Any) -> None:
    engine, session = engine_of(model), Session("a", PROMPT)
    session.turn(engine)
    engine.submit([session.request(20)])
    for _ in range(9):
        engine.poll(0.0)
    (output,) = engine.abort(["a-1"])  # as a stop string ends a turn
    assert len(output.token_ids) == 9
    prompt = len(session.tokens)
    cut = EngineOutput(
        output.request_id, output.token_ids[:5], output.logprobs[:5], output.spans, "abort"
    )
    session.ended(cut)
    after = session.request()
    engine.submit([after])
    before = engine.cache.cached_tokens
    (last,) = finish(engine)
    held = engine.cache.cached_tokens - before
    assert held == prompt + 5 + (after.prompt_ids[prompt + 5] == output.token_ids[5])
    assert len(last.token_ids) == 6
    full = torch.tensor([[*after.prompt_ids, *last.token_ids]])
    with torch.inference_mode():
        logits = model(full).logits[0, len(after.prompt_ids) - 1 : -1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(last.token_ids)[:, None])[:, 0]
    assert (expected - torch.tensor(last.logprobs)).abs().max() < CLOSE


@pytest.mark.parametrize("seed", [0, 1])
def test_many_sessions_at_once_with_weights_that_change(model: Any, seed: int) -> None:
    """As much is kept as the figures say, and every logprob is right for it."""
    models = {0: copy.deepcopy(model), **{v: other_weights(model, v) for v in (1, 2)}}
    source = random.Random(seed)
    engine = engine_of(model, seed=seed, slots=3, cache_tokens=20 * CONTEXT)
    sessions = {
        f"s{i}": Session(f"s{i}", PROMPT[: source.randint(1, 12)], seed=i) for i in range(6)
    }
    kept: dict[str, dict[int, int]] = {name: {} for name in sessions}
    loads = {9: 1, 30: 2}  # after so many turns
    ended = 0
    for session in sessions.values():
        engine.submit([session.request()])
    while engine.busy:
        for output in engine.poll(0.0):
            session = sessions[output.request_id.partition("-")[0]]
            session.ended(output)
            ended += 1
            if ended in loads:
                version = loads.pop(ended)
                load(engine, models[version].named_parameters(), version)
            if len(session.turns) < 7:
                turn = len(session.turns)
                if turn >= 2:
                    kept[session.name][turn] = len(session.tokens) - 1
                engine.submit([session.request(source.randint(1, 8), source.randint(1, 6))])
    assert not loads
    # Those that began together had equal prompts, perhaps, which were read once.
    shared = engine.cache.cached_tokens - sum(sum(each.values()) for each in kept.values())
    assert 0 <= shared <= sum(prompt for s in sessions.values() for prompt, _ in s.turns[:1])
    for name, session in sessions.items():
        assert differences(models, session, kept[name]) < CLOSE, name


# -- memory ---------------------------------------------------------------------------------------


def test_sequences_make_room_when_they_outgrow_the_cache(model: Any) -> None:
    engine = engine_of(model, slots=8, cache_tokens=CONTEXT + 60)
    asked = [request(index, 60) for index in range(8)]
    engine.submit(asked)
    assert engine.fits == 1, "each may get as long as the context"
    outputs: dict[str, EngineOutput] = {}
    most = 0
    while engine.busy:
        outputs |= {output.request_id: output for output in engine.poll(0.0)}
        stored = engine._cache.rows * engine._cache.columns
        assert stored <= CONTEXT + 60
        assert engine.cache.usage <= 1.0
        most = max(most, engine.live)
    assert most > 1
    assert engine.cache.preemptions > 0
    assert 1 < engine.fits < 8, "they were shorter than that"
    for one in asked:
        output = outputs[one.request_id]
        assert len(output.token_ids) == len(output.logprobs) == 60
        with torch.inference_mode():
            both = torch.tensor([[*one.prompt_ids, *output.token_ids]])
            logits = model(both).logits[0, len(one.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert (expected - torch.tensor(output.logprobs)).abs().max() < CLOSE


def test_what_is_kept_makes_room_for_what_is_decoded(model: Any) -> None:
    engine = engine_of(model, slots=4, cache_tokens=2 * CONTEXT)
    sessions = [Session(f"s{i}", PROMPT, seed=i) for i in range(4)]
    for session in sessions:
        session.turn(engine)
        session.turn(engine)
    assert engine._kept.tokens > 0
    engine.submit([EngineRequest("long", PROMPT, Sampling(temperature=1.0), 110)])
    while engine.busy:
        engine.poll(0.0)
        assert engine._kept.tokens + engine._cache.rows * engine._cache.columns <= 2 * CONTEXT
    for session in sessions:
        session.turn(engine)
        assert differences({0: model}, session, {}) < CLOSE


def test_sessions_are_let_go_before_their_memory_is_taken(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    capacity = 4 * CONTEXT
    engine = engine_of(model, slots=4, cache_tokens=capacity)
    reserve = SlotCache.reserve

    def watched(cache: SlotCache, rows: int, columns: int) -> None:
        planned = cache.plan(rows, columns)
        assert engine._kept.tokens + planned[0] * planned[1] <= capacity
        reserve(cache, rows, columns)
        assert (cache.rows, cache.columns) == planned

    monkeypatch.setattr(SlotCache, "reserve", watched)
    sessions = [Session(f"s{i}", [*PROMPT, *PROMPT], seed=i) for i in range(4)]
    for session in sessions:
        for _ in range(4):
            session.turn(engine)
    kept = engine._kept.tokens
    engine.submit([request(index, 100) for index in range(4)])
    finish(engine)
    assert kept > engine._kept.tokens, "it was needed"


def test_what_many_rows_needed_is_let_go_for_sessions(model: Any) -> None:
    """1. Rows fill the cache. 2. A session is alone. Result: all of its turns are kept."""
    engine = engine_of(model, slots=8, cache_tokens=8 * CONTEXT)
    engine.submit([request(index, 100) for index in range(8)])
    finish(engine)
    assert engine._cache.rows * engine._cache.columns > 4 * CONTEXT
    session = Session("a", PROMPT)
    session.turn(engine)
    session.turn(engine)
    assert engine._cache.rows * engine._cache.columns <= 4 * CONTEXT
    assert session.turn(engine) == session.turns[1][0] + 6 - 1
    assert differences({0: model}, session, {}) < CLOSE


def test_storage_grows_seldom_and_holds_at_most_half_in_reserve() -> None:
    cache = SlotCache(slots=64, max_context=4096, capacity=3 * 4096)
    sizes = list[tuple[int, int]]()
    for columns in range(1, 4097):
        cache.reserve(3, columns)
        sizes.append((cache.rows, cache.columns))
        assert cache.rows >= 3 and cache.columns >= columns
        spare = (3, columns + max(64, columns // 8))
        assert cache.rows * cache.columns <= max(cache.capacity // 2, spare[0] * spare[1])
    assert len(set(sizes)) <= 16
    assert sizes[-1] == (3, 4096)
    cache.reserve(2, 100)
    assert cache.rows * cache.columns <= cache.capacity // 2
    for rows in range(1, 65):
        cache.reserve(rows, 100)
        assert cache.rows >= rows and cache.columns >= 100
        assert cache.rows * cache.columns <= cache.capacity


def test_memory_for_less_than_one_sequence_is_refused(model: Any, tiny_model_dir: Path) -> None:
    with pytest.raises(
        UsageError, match=r"kv_cache_mb holds 100 tokens of this model, .*max_context = 128"
    ):
        engine_of(model, cache_tokens=100)
    overrides = [f"model.path={tiny_model_dir}", "generator.device=cpu", "generator.slots=9000"]
    config = load_config(overrides=[*overrides, "generator.kv_cache_mb=8"], environ={})
    opened = open_engine(config, "generator-0")
    assert isinstance(opened.engine, TorchEngine)
    assert opened.engine._cache.capacity == cache_tokens(model, 8)


def test_how_many_sequences_fit_goes_by_lengths_of_late() -> None:
    lengths = RecentLengths(most=100)
    assert lengths.fitting(1000, []) == 10, "nothing is known yet"
    for length in (10, 30):
        lengths.ended(length)
    assert (lengths.mean, lengths.longest) == (20, 30)
    assert lengths.fitting(1000, []) == 50
    assert lengths.fitting(1000, [1, 19, 400]) == 3 + (1000 - 20 - 20 - 400) // 20
    assert lengths.fitting(1000, [600, 700]) == 1, "too many already"
    for _ in range(256):
        lengths.ended(5)
    assert (lengths.mean, lengths.longest) == (5, 5)
