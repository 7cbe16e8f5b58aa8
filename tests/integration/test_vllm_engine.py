"""The engine on real vLLM, on the CPU, inside and as a server. The last test ends it."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fakes.commands import needs
from fakes.mixed_cache import (
    Session,
    differences,
    logprobs_keeping_cache,
    logprobs_recomputing_cache,
)
from fakes.versions import (
    decode,
    finish,
    in_memory,
    load,
    other_weights,
    prompt,
    request,
    versions_of,
    weights,
    worst,
)
from fakes.vllm_serve import VllmServe, opened, serving, vllm_config

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling
from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import Engine, EngineError, EngineOutput, EngineRequest
from umbra.services.generator.vllm.http_engine import HttpEngine
from umbra.services.modeling.models import load_model
from umbra.services.weights import memory
from umbra.services.weights.gpu.cuda import DeviceMemory

needs("vllm")
pytestmark = [
    pytest.mark.timeout(240),  # starting it takes 20 to 40 s
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

SLOTS = 64
WAITING = 48  # requests that have no slot at first
CONTEXT = 512
VERSIONS = 4
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def models(vllm_model_dir: Path) -> dict[int, Any]:
    torch.set_num_threads(1)  # the engine has the other core
    first = load_model(vllm_model_dir, torch.device("cpu"), torch.float32)
    return {0: first, **{version: other_weights(first, version) for version in range(1, VERSIONS)}}


@pytest.fixture(scope="module", params=["vllm", pytest.param("vllm-http", marks=pytest.mark.real)])
def config(
    request: pytest.FixtureRequest, vllm_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunConfig]:
    engine: dict[str, Any] = {"engine": request.param, "slots": SLOTS, "max_context": CONTEXT}
    with ExitStack() as stack:
        if request.param == "vllm-http":
            log = tmp_path_factory.mktemp("server") / "vllm.log"
            server = VllmServe(vllm_model_dir, log, context=CONTEXT, slots=SLOTS)
            stack.enter_context(serving(server))
            engine["urls"] = f'["{server.url}"]'
        yield vllm_config(vllm_model_dir, device="cpu", threads=1, **engine)


@pytest.fixture(scope="module")
def engine(config: RunConfig, models: dict[int, Any]) -> Iterator[Engine]:
    with opened(config) as engine:
        assert not processes("Worker"), "its core would spin while it waits for one"
        if isinstance(engine, HttpEngine):  # else most sequences end after 100 tokens
            engine._stop_ids.clear()  # pyright: ignore[reportPrivateUsage]
        load(engine, weights(models, 0), 0, "keep")
        engine.submit([request(i, 8) for i in range(SLOTS)])  # first steps take seconds
        finish(engine)
        yield engine
    assert config.generator.urls or not processes("EngineCore")


@pytest.fixture
def served(engine: Engine, models: dict[int, Any]) -> Engine:
    """The engine, idle, with version 0."""
    engine.abort()
    load(engine, weights(models, 0), 0, "keep")
    return engine


def processes(name: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that has just ended, zombies included
            if name in " ".join(child.cmdline()):
                found.append(child)
    return found


def some(engine: Engine, each: int, least: int = SLOTS) -> int:
    """So many tokens of each request; `least` of a server, whose core is ahead of what has come."""
    return least if isinstance(engine, HttpEngine) else SLOTS * each


def updated_in_flight(
    engine: Engine, models: dict[int, Any], policy: str
) -> dict[int, EngineOutput]:
    """64 requests, and others that wait for a slot; three updates while they run."""
    versions = [in_memory(dict(weights(models, version))) for version in range(VERSIONS)]
    tokens = some(engine, 2, 440)  # a core runs on while an update is asked for, five calls each
    number = SLOTS + some(engine, 2, WAITING)  # so many that some begin after an update
    engine.submit([request(i, tokens) for i in range(number)])
    outputs: list[EngineOutput] = []
    for version in range(1, VERSIONS):
        least = SLOTS if version == 1 else 1  # far from the end: a core may run on
        outputs += decode(engine, some(engine, 4, least))
        engine.load(*versions[version], version, policy)  # pyright: ignore[reportArgumentType]
    outputs += finish(engine)
    assert sorted(o.request_id for o in outputs) == sorted(f"s{i}" for i in range(number))
    assert all(o.finish_reason == "stop" or len(o.token_ids) == tokens for o in outputs)
    return {int(o.request_id[1:]): o for o in outputs}


@pytest.mark.parametrize(
    ("policy", "right", "wrong"),
    [
        ("keep", logprobs_keeping_cache, logprobs_recomputing_cache),
        ("recompute", logprobs_recomputing_cache, None),
    ],
)
def test_three_updates_in_flight_keep_every_request(
    served: Engine, models: dict[int, Any], policy: str, right: Any, wrong: Any
) -> None:
    outputs = updated_in_flight(served, models, policy)
    for output in outputs.values():
        versions = versions_of(output)
        assert versions == sorted(set(versions))
    assert sum(len(o.spans) == VERSIONS for o in outputs.values()) >= 8
    assert any(o.spans[0].version > 0 for o in outputs.values()), "some waited for a slot"
    assert worst(right, models, outputs) < TOLERANCE
    assert wrong is None or worst(wrong, models, outputs) > 100 * TOLERANCE


def test_an_abort_hands_back_what_there_is(served: Engine, models: dict[int, Any]) -> None:
    # So long that a core which runs on while it is asked is through with few.
    served.submit([request(i, 400) for i in range(SLOTS + WAITING)])
    outputs = decode(served, some(served, 10)) + served.abort()
    names = sorted(f"s{i}" for i in range(SLOTS + WAITING))
    assert sorted(o.request_id for o in outputs) == names
    assert not served.busy
    aborted = [o for o in outputs if o.finish_reason == "abort"]
    known = {int(o.request_id[1:]): o for o in aborted if o.token_ids}
    assert len(known) > SLOTS // 2
    assert all(span.version == 0 for o in known.values() for span in o.spans)
    assert worst(logprobs_keeping_cache, models, known) < TOLERANCE


def test_new_requests_do_not_read_prefixes_of_older_weights(
    served: Engine, models: dict[int, Any]
) -> None:
    long = [5 + k % 90 for k in range(100)]
    for version in (0, 1, 2):
        if version:
            load(served, weights(models, version), version, "keep")
        for attempt in range(2):  # the second one finds the first one's prefix
            sampling = Sampling(max_tokens=8)
            served.submit([EngineRequest(f"p{attempt}", long, sampling, 8)])
            (output,) = finish(served)
            again = logprobs_recomputing_cache(models, long, output)
            assert output.logprobs == pytest.approx(again, abs=TOLERANCE)


def test_a_session_reads_itself_anew_at_one_update_alone_and_others_never_read_it(
    config: RunConfig, served: Engine, models: dict[int, Any]
) -> None:
    if config.generator.urls:
        pytest.skip("their answers do not say how much was cached")
    long = [5 + k % 90 for k in range(100)]
    session = Session("a", long)
    assert session.turn(served) == 0
    assert session.turn(served) == 96, "the weights are the same; blocks have 32 tokens"
    load(served, weights(models, 1), 1, "keep")
    assert session.turn(served) == 0, "from now on it is read by itself alone"
    kept: dict[int, int] = {}
    for version in (2, 3):
        whole_blocks = (len(session.tokens) - 1) // 32 * 32
        load(served, weights(models, version), version, "keep")
        kept[len(session.turns)] = whole_blocks
        assert session.turn(served) == whole_blocks
    assert differences(models, session, kept) < TOLERANCE
    assert differences(models, session, {}) > 100 * TOLERANCE
    # One that begins as it did, whose salt is that of all who begin now, and one that had its
    # first turn before the last load.
    other = Session("b", long)
    assert other.turn(served) == 0
    load(served, weights(models, 0), 0, "keep")
    assert other.turn(served) == 0
    assert differences(models, other, {}) < TOLERANCE
    for name in ("a", "b"):
        served.forget(name)
    load(served, weights(models, 1), 1, "recompute")
    assert session.turn(served) == 0


def test_a_look_at_requests_does_not_disturb_them(served: Engine, models: dict[int, Any]) -> None:
    served.submit([request(i, 150) for i in range(8)])
    done = decode(served, 8)
    load(served, weights(models, 1), 1)
    done += decode(served, 8 * 10)
    asked = [name for name, made in served.new_tokens().items() if len(made) >= 5][:6]
    seen = served.peek([*asked, "elsewhere"])
    ends = {o.request_id: o for o in done + finish(served)}
    assert len(ends) == 8
    assert seen  # but those that were done before
    assert {o.request_id for o in seen} <= set(asked)
    for part in seen:
        whole, count = ends[part.request_id], len(part.token_ids)
        assert count == len(part.logprobs) >= 5
        assert part.token_ids == whole.token_ids[:count]
        # Versions begin where they do in the whole.
        found = [(one.version, one.start, min(one.end, count)) for one in whole.spans]
        told = [(one.version, one.start, one.end) for one in part.spans]
        assert told == [one for one in found if one[1] < count]


def test_a_bad_request_is_refused_in_one_sentence(served: Engine) -> None:
    for ids, sampling, part in (
        ([5, 101], Sampling(), "token 101"),
        ([5], Sampling(temperature=0.001), "sampling.temperature = 0.001"),
    ):
        with pytest.raises(ValueError, match=part):
            served.submit([EngineRequest("bad", ids, sampling, 4)])
        assert not served.busy


def test_weights_that_do_not_fit_change_nothing(served: Engine, models: dict[int, Any]) -> None:
    few = [(n, w) for n, w in weights(models, 1) if "embed" not in n and "lm_head" not in n]
    served.submit([request(0)])
    with pytest.raises(UsageError, match=r"missing: model\.embed_tokens\.weight"):
        load(served, few, 1, "keep")
    (output,) = finish(served)
    assert served.version == 0
    assert [span.version for span in output.spans] == [0]


def test_staged_weights_are_read_where_they_lie(
    config: RunConfig, served: Engine, models: dict[int, Any]
) -> None:
    """As the receiver does it: a version in one block of the engine's shared memory."""
    manifest, block = in_memory(dict(weights(models, 2)))
    blocks = memory._blocks  # pyright: ignore[reportPrivateUsage]
    before = len(blocks)
    served.load(manifest, block, 2, "keep")
    assert len(blocks) == before  # no copy was made
    check_served(served, models, 2)


class NotMapped(DeviceMemory):
    """Memory of a GPU that no other process can map."""

    @cached_property
    def handle(self) -> bytes:
        return b"of another container"

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)


def test_gpu_memory_that_workers_cannot_map_is_refused(
    config: RunConfig, served: Engine, models: dict[int, Any]
) -> None:
    if config.generator.urls:
        pytest.skip("receivers of servers have no GPU")
    manifest, block = in_memory(dict(weights(models, 1)))
    refused = 'cannot map memory of the GPU.*set weight_hub.plane to "shm" or "tcp"'
    for _ in range(2):
        with pytest.raises(UsageError, match=refused):
            served.load(manifest, NotMapped(block), 1, "keep")
        check_served(served, models, 0)


def check_served(engine: Engine, models: dict[int, Any], version: int) -> None:
    engine.submit([request(0, 12)])
    (output,) = finish(engine)
    again = logprobs_recomputing_cache(models, prompt(0), output)
    assert [span.version for span in output.spans] == [version]
    assert output.logprobs == pytest.approx(again, abs=TOLERANCE)


def test_it_ends_with_a_reason(config: RunConfig, served: Engine, models: dict[int, Any]) -> None:
    """The last test: its core is killed, and then given a version."""
    if config.generator.urls:
        pytest.skip("servers may come back: tests/generator/test_http_engine.py")
    served.submit([request(i) for i in range(8)])
    done = decode(served, 8)  # one may end early
    for core in processes("EngineCore"):
        os.kill(core.pid, signal.SIGKILL)
    reason = r"core died \(EngineCore killed by SIGKILL"
    with pytest.raises(EngineError, match=reason):
        load(served, weights(models, 1), 1)
    with pytest.raises(EngineError, match=reason):
        while True:
            done += served.poll(0.05)
    done += served.abort()
    assert {o.request_id for o in done} <= {f"s{i}" for i in range(8)}
    assert not served.new_tokens()
