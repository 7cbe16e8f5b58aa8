"""Engines by one suite: torch, and vLLM inside. The last test ends it.

Servers of vLLM are in `tests/generator/test_http_engine.py` and, real ones, `test_vllm_servers.py`.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import psutil
import pytest
import torch
from fakes.versions import (
    decode,
    finish,
    in_memory,
    load,
    logprobs_keeping_cache,
    logprobs_recomputing_cache,
    other_weights,
    prompt,
    request,
    versions_of,
    weights,
    worst,
)
from fakes.vllm_serve import opened, vllm_config

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling
from umbra.services.config import RunConfig
from umbra.services.generator.engines.engine import Engine, EngineError, EngineOutput, EngineRequest
from umbra.services.modeling.models import load_model
from umbra.services.weights import memory
from umbra.services.weights.gpu.cuda import DeviceMemory

pytestmark = [
    pytest.mark.timeout(240),  # starting it takes 20 to 40 s
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

SLOTS = 64
WAITING = 48  # requests that have no slot at first
CONTEXT = 512
VERSIONS = 4
TOLERANCE = 2e-4
LONG = [5 + k % 90 for k in range(100)]


@pytest.fixture(scope="module")
def models(vllm_model_dir: Path) -> dict[int, Any]:
    torch.set_num_threads(1)  # the engine has the other core
    first = load_model(vllm_model_dir, torch.device("cpu"), torch.float32)
    return {0: first, **{version: other_weights(first, version) for version in range(1, VERSIONS)}}


@pytest.fixture(scope="module", params=["torch", "vllm"])
def config(request: pytest.FixtureRequest, vllm_model_dir: Path) -> RunConfig:
    if request.param == "vllm":
        pytest.importorskip("vllm", reason="vllm is not installed (make setup)")
    sizes = {"threads": 1, "slots": SLOTS, "max_context": CONTEXT}
    return vllm_config(vllm_model_dir, engine=request.param, device="cpu", **sizes)


@pytest.fixture(scope="module")
def engine(config: RunConfig, models: dict[int, Any]) -> Iterator[Engine]:
    with opened(config) as engine:
        assert not processes("Worker"), "its core would spin while it waits for one"
        load(engine, weights(models, 0), 0, "keep")
        engine.submit([request(i, 8) for i in range(SLOTS)])  # first steps take seconds
        finish(engine)
        yield engine
    assert not processes("EngineCore")


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


def updated_in_flight(engine: Engine, models: Any, policy: Any) -> dict[int, EngineOutput]:
    """Return outputs of 64 requests, and others that wait for a slot, by number.

    Three updates come while they run.
    """
    versions = [in_memory(dict(weights(models, version))) for version in range(VERSIONS)]
    tokens, number = 2 * SLOTS, 3 * SLOTS  # so many that some begin after an update
    engine.submit([request(i, tokens) for i in range(number)])
    outputs: list[EngineOutput] = []
    for version in range(1, VERSIONS):
        outputs += decode(engine, 4 * SLOTS)
        engine.load(*versions[version], version, policy)
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


def test_an_abort_hands_back_what_there_is_and_leaves_others_exact(
    served: Engine, models: dict[int, Any]
) -> None:
    served.submit([request(i, 400) for i in range(SLOTS + WAITING)])
    done = decode(served, 5 * SLOTS)
    part = served.abort([*(f"s{i}" for i in range(0, SLOTS + WAITING, 9)), "absent"])
    assert {o.request_id for o in (*done, *part)} >= {"s0", f"s{SLOTS + WAITING - 4}"}
    outputs = [*done, *part, *decode(served, 5 * SLOTS), *served.abort()]
    names = sorted(f"s{i}" for i in range(SLOTS + WAITING))
    assert sorted(o.request_id for o in outputs) == names
    assert not served.busy
    aborted = [o for o in outputs if o.finish_reason == "abort"]
    known = {int(o.request_id[1:]): o for o in aborted if o.token_ids}
    assert len(known) > SLOTS // 2
    assert all(versions_of(o) == [0] for o in known.values())
    assert worst(logprobs_keeping_cache, models, known) < TOLERANCE


class Session:
    """A conversation on a vLLM without other work."""

    def __init__(self, name: str) -> None:
        self.name, self.tokens, self.turns = name, list(LONG), 0

    def turn(self, engine: Engine) -> int:
        """Have a turn; return how many tokens were not read again for it."""
        from umbra.services.generator.vllm import private  # brings vLLM

        if self.turns:
            self.tokens += [7, 8, 9, 10]
        self.turns += 1
        asked = EngineRequest(f"{self.name}-{self.turns}", [*self.tokens], Sampling(), 6, self.name)
        with patch.object(private, "finished", wraps=private.finished) as finished:
            engine.submit([asked])
            (output,) = finish(engine)
        self.tokens += output.token_ids
        return finished.call_args.args[0].num_cached_tokens


def test_a_session_reads_itself_anew_at_one_update_alone_and_others_never_read_it(
    config: RunConfig, served: Engine, models: dict[int, Any]
) -> None:
    if config.generator.engine == "torch":
        pytest.skip("it caches nothing")
    session, other = Session("a"), Session("b")
    assert session.turn(served) == 0
    assert session.turn(served) == 96, "the weights are the same; blocks have 32 tokens"
    load(served, weights(models, 1), 1, "keep")
    assert session.turn(served) == 0, "from now on it is read by itself alone"
    for version in (2, 3):
        whole_blocks = (len(session.tokens) - 1) // 32 * 32
        load(served, weights(models, version), version, "keep")
        assert session.turn(served) == whole_blocks
    # One that begins as it did reads no prefix of older weights: its salt is that of all who begin
    # now. Nor does one that had its first turn before the last load.
    assert other.turn(served) == 0
    load(served, weights(models, 0), 0, "keep")
    assert other.turn(served) == 0
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


def test_a_bad_request_or_weights_that_do_not_fit_change_nothing(
    config: RunConfig, served: Engine, models: dict[int, Any]
) -> None:
    bad: list[tuple[list[int], dict[str, float], str]] = [
        ([], {}, "its prompt has no tokens"),
        ([5] * CONTEXT, {}, "512 prompt tokens and 4 new ones do not fit a context of 512"),
        ([5, 101], {}, "its prompt has token 101, but the model knows 101"),
        ([5], {"temperature": -1.0}, "sampling.temperature = -1 is out of range: use 0 or more"),
        ([5], {"top_p": float("nan")}, "sampling.top_p = nan is out of range"),
        ([5], {"top_k": -2}, "sampling.top_k = -2 is out of range: use 0 or more"),
        ([5], {"min_p": 1.5}, "sampling.min_p = 1.5 is out of range: use between 0 and 1"),
    ]
    if config.generator.engine != "torch":
        bad.append(([5], {"temperature": 0.001}, "sampling.temperature = 0.001"))
    for ids, sampling, sentence in bad:
        how = Sampling(**sampling)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match=re.escape(sentence)):
            served.submit([EngineRequest("bad", ids, how, 4)])
        assert not served.busy
    few = [(n, w) for n, w in weights(models, 1) if "embed" not in n and "lm_head" not in n]
    served.submit([request(0)])
    with pytest.raises(UsageError, match=r"missing: model\.embed_tokens\.weight"):
        load(served, few, 1, "keep")
    (output,) = finish(served)
    assert served.version == 0
    assert [span.version for span in output.spans] == [0]


def check_served(engine: Engine, models: dict[int, Any], version: int) -> None:
    engine.submit([request(0, 12)])
    (output,) = finish(engine)
    again = logprobs_recomputing_cache(models, prompt(0), output)
    assert [span.version for span in output.spans] == [version]
    assert output.logprobs == pytest.approx(again, abs=TOLERANCE)


def test_staged_weights_are_read_where_they_lie_or_refused(
    config: RunConfig, served: Engine, models: dict[int, Any]
) -> None:
    """As the receiver does it: a version in one block of the engine's shared memory, or a GPU's."""
    manifest, block = in_memory(dict(weights(models, 2)))
    gpu = MagicMock(spec=DeviceMemory, handle=b"of another container")
    gpu.__len__.return_value = len(block)
    refused = 'cannot map memory of the GPU.*set weight_hub.plane to "shm" or "tcp"'
    for _ in range(2 * (config.generator.engine == "vllm")):
        with pytest.raises(UsageError, match=refused):
            served.load(manifest, gpu, 1, "keep")
        check_served(served, models, 0)
    blocks = memory._blocks  # pyright: ignore[reportPrivateUsage]
    before = len(blocks)
    served.load(manifest, block, 2, "keep")
    assert len(blocks) == before  # no copy was made
    check_served(served, models, 2)


def test_it_ends_with_a_reason(config: RunConfig, served: Engine, models: dict[int, Any]) -> None:
    """The last test: its core is killed, and then given a version."""
    if config.generator.engine == "torch":
        pytest.skip("it has no core")
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
