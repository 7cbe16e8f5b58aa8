"""Real `vllm serve`: killed at each step of a load, and on another host than the trainer.

What a server may do at any moment is in `tests/generator/test_http_engine.py`.
"""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fakes.commands import UMBRA, call, needs
from fakes.machines import needs_hosts, on_hosts
from fakes.slowness import limit, until
from fakes.versions import (
    decode,
    finish,
    go_on,
    load,
    logprobs_keeping_cache,
    logprobs_recomputing_cache,
    other_weights,
    request,
    versions_of,
    weights,
)
from fakes.vllm_models import write_model
from fakes.vllm_serve import VllmServe, opened, serving, vllm_config

from umbra.services.generator.engines.engine import Engine, EngineOutput
from umbra.services.generator.vllm.http_engine import HttpEngine
from umbra.services.generator.vllm.server import VllmServer
from umbra.services.modeling.models import load_model
from umbra.services.trainer.make_model import make_model

needs("vllm")
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

UPDATE = ("start_weight_update", "update_weights", "finish_weight_update")
LOADING = ("pause", *UPDATE, "weight_info", "resume")
POLICIES: list[Any] = ["keep", "recompute"]  # of loads, in turn
REQUESTS, TOKENS, SLOTS = 16, 100, 32
TOLERANCE = 1e-3
STEPS = 10


def over(model: Path, urls: list[str]) -> AbstractContextManager[Engine]:
    own = {"urls": json.dumps(urls), "slots": SLOTS, "max_context": 192}
    return opened(vllm_config(model, engine="vllm-http", **own))


def models_of(directory: Path) -> dict[int, Any]:
    torch.set_num_threads(1)
    found = [load_model(directory, torch.device("cpu"), torch.float32)]
    found += [other_weights(found[0], seed) for seed in (1, 2)]
    return {version: found[version % 3] for version in range(3 * len(LOADING))}


@contextmanager
def after(step: str, url: str, act: Callable[[], object]) -> Iterator[None]:
    """`act` once, when a server whose address has `url` has answered this step of a load."""
    plain, left = VllmServer.call, [act]
    before: dict[str, str] = {}  # of each server, as both load at once

    async def calling(server: VllmServer, target: str, body: Any = None, **how: Any) -> bytes:
        answer = await plain(server, target, body, **how)
        if url in server.url:
            name = target[1:].partition("?")[0]
            last, before[server.url] = before.get(server.url), name
            looks = name == "weight_info" and last != "finish_weight_update"
            if left and name == step and not looks:
                left.pop()()
        return answer

    with patch.object(VllmServer, "call", calling):
        yield
        until(lambda: not left, f"{step} was reached", quiet_s=120.0)


def begin(engine: Engine, models: dict[int, Any], version: int) -> list[EngineOutput]:
    """Have both servers serve `version`, with requests under way; return the done ones."""
    load(engine, weights(models, version), version)
    assert isinstance(engine, HttpEngine)
    until(lambda: all(s.is_ready for s in engine.servers), "both serve", quiet_s=120.0)
    engine.submit([request(i, TOKENS) for i in range(REQUESTS)])
    return decode(engine, REQUESTS)


def answer(
    engine: Engine, models: dict[int, Any], version: int, outputs: list[EngineOutput]
) -> None:
    """Finish all requests, going on with what broke off, and compute each logprob once more."""
    reference = (logprobs_keeping_cache, logprobs_recomputing_cache)[version % 2]
    answers = go_on(engine, REQUESTS, TOKENS, outputs)
    for name, parts in answers.items():
        ids = list(request(int(name[1:])).prompt_ids)
        for part in parts:
            if part.token_ids:
                again = reference(models, ids, part)
                assert part.logprobs == pytest.approx(again, abs=TOLERANCE), part.spans
                assert set(versions_of(part)) <= {version - 1, version}
            ids += part.token_ids
    engine.submit([request(REQUESTS, TOKENS)])  # the others may have ended before the load
    (last,) = finish(engine)
    assert versions_of(last) == [version]


def die_after(step: str, directory: Path, urls: list[str]) -> None:
    """Be a generator that is killed in a load."""
    models, die = models_of(directory), partial(os.kill, os.getpid(), signal.SIGKILL)
    with over(directory, urls) as engine:
        begin(engine, models, 0)
        with after(step, "", die):
            load(engine, weights(models, 1), 1)


def test_kills_at_each_step(tmp_path: Path) -> None:
    directory = write_model("qwen3-moe", tmp_path / "model")
    models = models_of(directory)
    servers = [VllmServe(directory, tmp_path / f"{n}.log", seed=n) for n in (1, 2)]
    urls = [server.url for server in servers]
    with serving(*servers):
        for step in LOADING:
            child = multiprocessing.get_context("spawn").Process(
                target=die_after, args=(step, directory, urls)
            )
            child.start()
            child.join(limit(120.0))
            assert child.exitcode == -signal.SIGKILL, step
            with over(directory, urls) as engine:
                done = begin(engine, models, 1)
                load(engine, weights(models, 2), 2, POLICIES[0])
                answer(engine, models, 2, done)
        with over(directory, urls) as engine:
            for version, step in enumerate(LOADING, 1):
                done = begin(engine, models, version - 1)
                victim = servers[version % 2]
                with after(step, victim.url, victim.kill):
                    load(engine, weights(models, version), version, POLICIES[version % 2])
                answer(engine, models, version, done)
                victim.start()


def test_a_run_whose_servers_are_on_another_host(project: Path) -> None:
    needs_hosts()
    (project / "model").unlink()
    make_model(project / "model", hidden=64, heads=2, kv_heads=1, layers=1, ff=32)
    call([*UMBRA, "keys", "runs/keys"], cwd=project, check=True)
    codes = json.loads(on_hosts("servers_run", project, str(STEPS)))
    assert codes == {"up": [0], "relay": [0], "generator": [0]}
    (path,) = (project / "runs").glob("*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["steps"] == STEPS
    assert summary["ledger"]["balance"] == sum(summary["ledger"]["in_flight"].values()) == 0
    assert summary["ledger"]["trained"] == STEPS * 16
    assert summary["mismatch_k3_on_policy"] < 1e-5
