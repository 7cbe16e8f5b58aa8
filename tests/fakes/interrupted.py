"""Conversations that one generator after another goes on with, at places drawn at random."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fakes.closeness import assert_same_logprobs
from fakes.trajectories import sample
from fakes.versions import logprobs_of

from umbra.proto.records import Sampling, Trajectory, unpack_float32, unpack_int32
from umbra.services.environments.pool import InlinePool
from umbra.services.environments.protocol import StepResult
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.packing import pack
from umbra.services.modeling.pretrained import load_tokenizer
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer.batch import make_batch

STOPS = range(3, 12)  # so many that turns end
TURNS = 3
SAMPLES = 8
CONTEXT = 256
TEMPERATURE = 0.7
TOLERANCE = 1e-4


class Talk:
    def __init__(self) -> None:
        self._turn = 0

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self._turn = 0
        return [{"role": "user", "content": row["prompt"]}]

    def step(self, response: str) -> StepResult:
        self._turn += 1
        if self._turn == TURNS:
            return StepResult(reward=float(len(response)))
        return StepResult(done=False, messages=[{"role": "user", "content": f"go {self._turn}"}])


def roll(
    engine_of: Callable[[int], Engine],
    folder: Path,
    temperature: float,
    cuts: random.Random | None = None,
    top_k: int = 0,
) -> dict[str, Trajectory]:
    """Eight samples on one generator; with `cuts`, on the next one after every few tokens.

    Args:
        engine_of: an idle engine that serves the version of this number.
        folder: of the model.
        temperature: of the sampling.
        cuts: draws after how many tokens samples are handed back.
        top_k: of the sampling.
    """
    chat = Chat(load_tokenizer(folder), STOPS)
    sampling = Sampling(temperature=temperature, top_k=top_k, max_tokens=40)
    settings = RolloutSettings(chat=chat, sampling=sampling, max_context=CONTEXT)
    tasks = [sample({"prompt": "x" * (1 + i)}, sample_id=f"s{i}") for i in range(SAMPLES)]
    done: dict[str, Trajectory] = {}
    for generator in range(1000):
        engine = engine_of(generator)
        runner = RolloutRunner(engine, InlinePool(Talk), settings)
        runner.add(tasks)
        limit = cuts.randint(1, 40) if cuts is not None else 1_000_000
        until = engine.decoded_tokens + limit
        while runner.active and engine.decoded_tokens < until:
            runner.poll(0.001)
        finished, failed = runner.results()
        assert not failed
        done |= {t.sample_id: t for t in finished}
        rows = {one.sample_id: one.row for one in tasks}
        tasks = [
            sample(
                rows[back.sample_id],
                sample_id=back.sample_id,
                attempt=generator + 2,
                trajectory=back.partial,
            )
            for back in runner.drain("next")
        ]
        if not tasks:
            return done
    raise AssertionError("rollouts do not end")


def check_same(pieces: dict[str, Trajectory], whole: dict[str, Trajectory]) -> None:
    """Check that interrupted samples equal uninterrupted ones, token for token."""
    assert max(len(t.spans) for t in pieces.values()) > 3  # so many generators had a hand in it
    for name, expected in whole.items():
        got = pieces[name]
        for field in ("prompt_ids", "response_ids", "loss_mask", "reward", "turns"):
            assert getattr(got, field) == getattr(expected, field), (name, field)


def check_logprobs(model: Any, pieces: dict[str, Trajectory]) -> None:
    """Each logprob is that of one forward pass of `model` over the whole."""
    assert max(len(t.spans) for t in pieces.values()) > 3
    assert {t.turns for t in pieces.values()} >= {TURNS}
    for trajectory in pieces.values():
        prompt, tokens = map(unpack_int32, (trajectory.prompt_ids, trajectory.response_ids))
        mask = torch.tensor(list(trajectory.loss_mask)).bool()
        got = torch.tensor(unpack_float32(trajectory.logprobs))
        expected = teacher_forced(model, prompt, tokens)
        assert_same_logprobs(got[mask], expected[mask], model)
        ratio = (expected - got)[mask].double()
        assert float((torch.expm1(ratio) - ratio).mean()) < 1e-5  # k3
        covered = [i for span in trajectory.spans for i in range(span.start, span.end)]
        assert covered == list(range(len(tokens)))


@torch.no_grad()
def check_supports(model: Any, pieces: dict[str, Trajectory], *, centered: bool = False) -> None:
    """Over the tokens that samples tell, drawn by `top_k` = 4, a trainer finds their logprobs."""
    assert max(len(t.spans) for t in pieces.values()) > 3
    batch = make_batch([*pieces.values()], model.config.vocab_size, centered=centered)
    supports = batch.tokens.support
    assert supports is not None and supports.whole.all() and (supports.sizes == 4).all()
    for micro in pack(batch.tokens, pack_tokens=128, micro_tokens=512, share_prompts=True):
        found, _ = Scorer(model)(micro, batch.temperature[micro.source], with_support=True)
        assert_same_logprobs(found[:, 0], batch.behaviour[micro.source], model)
        if centered:
            at, _ = supports.rows(micro.source)
            assert_same_logprobs(found[:, 1:], supports.logprobs[at], model)


@torch.no_grad()
def teacher_forced(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logprobs of `tokens` [T] after `TEMPERATURE`, in one forward pass."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return logprobs_of(logits, tokens, TEMPERATURE)
