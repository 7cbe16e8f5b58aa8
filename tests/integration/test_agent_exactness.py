"""An agent's trajectory records the sampled tokens, whatever happens on the way."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.agents import AgentWorld, Make, client, play, reward
from fakes.closeness import assert_same_logprobs
from fakes.fixtures import Closes
from fakes.interrupted import TEMPERATURE, TURNS, teacher_forced
from fakes.trajectories import sample
from fakes.versions import load, other_weights

from umbra.proto.records import Sampling, unpack_float32, unpack_int32
from umbra.services.config import EnvironmentConfig
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.pretrained import load_tokenizer

STOPS = [3, *range(6, 101, 5)]  # so many that turns end, of 7, 13 and 10 tokens when greedy


@pytest.fixture
def world(tiny_model_dir: Path, closes: Closes) -> Make:
    chat = Chat(load_tokenizer(tiny_model_dir), STOPS)

    def make(engine: TorchEngine, temperature: float, **options: Any) -> AgentWorld:
        sampling = Sampling(temperature=temperature, max_tokens=200)
        settings = RolloutSettings(chat, sampling, engine.max_context)
        return closes(AgentWorld(engine, settings, EnvironmentConfig(kind="agent"), **options))

    return make


def engines(model: Any) -> Callable[[int], TorchEngine]:
    options: Any = {"stop_ids": STOPS, "slots": 2, "max_context": 1024, "seed": 5}
    return lambda attempt: TorchEngine(model, **options, version=attempt)


def test_tokens_and_logprobs_are_those_of_the_engine_while_weights_change(
    model: Any, world: Make, tiny_model_dir: Path
) -> None:
    models = {0: copy.deepcopy(model), **{v: other_weights(model, v) for v in (1, 2, 3)}}
    engine = engines(model)(0)
    due = [(3, 1), (11, 2), (12, 3)]  # (after so many tokens, version)

    def update(runner: RolloutRunner) -> None:
        if due and engine.decoded_tokens >= due[0][0]:
            _, version = due.pop(0)
            runner.take(load(engine, models[version].named_parameters(), version, "recompute"))

    endpoint = world(engine, TEMPERATURE, between=update)
    endpoint.add(sample({"prompt": "talk"}))
    work = endpoint.lease()
    messages: list[Any] = [{"role": "user", "content": "talk"}]
    logprobs: list[float] = []
    versions: list[str | None] = []
    with client(work) as agent:
        for turn in range(TURNS):
            said = agent.chat.completions.create(
                model="m", messages=messages, logprobs=True, temperature=TEMPERATURE
            )
            content = said.choices[0].logprobs
            assert content is not None
            logprobs += [token.logprob for token in content.content or []]
            versions.append(said.system_fingerprint)
            messages += [said.choices[0].message, {"role": "user", "content": f"go {turn}"}]
    assert reward(work, 1.0)[0] == 200
    trajectory = endpoint.trajectory()
    prompt, tokens = unpack_int32(trajectory.prompt_ids), unpack_int32(trajectory.response_ids)
    mask = torch.tensor(list(trajectory.loss_mask)).bool()
    got = torch.tensor(unpack_float32(trajectory.logprobs))
    spans = trajectory.spans
    assert not due
    assert [span.version for span in spans] == [0, 1, 2, 3]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(tokens)
    assert versions[-1] == "version-3"
    expected = torch.cat(
        [teacher_forced(models[s.version], prompt, tokens)[s.start : s.end] for s in spans]
    )
    assert_same_logprobs(got[mask], expected[mask], models[0])
    assert torch.equal(got[mask], torch.tensor(logprobs))
    # Whoever had tokenised the messages again would have trained on other tokens.
    tokenizer = load_tokenizer(tiny_model_dir)
    history = [m if isinstance(m, dict) else m.model_dump() for m in messages[:-1]]
    again = tokenizer(
        tokenizer.apply_chat_template(history, tokenize=False), add_special_tokens=False
    )["input_ids"]
    assert again != [*prompt, *tokens]


@pytest.mark.parametrize("cuts", [[9], [4, 8, 6]])
def test_a_sample_goes_on_token_for_token_on_another_generator(
    model: Any, world: Make, cuts: list[int]
) -> None:
    def hints(attempt: int) -> list[str]:
        del attempt
        return [f"go {turn}" for turn in range(TURNS)]

    whole = play(world, engines(model), [], hints)
    pieces = play(world, engines(model), cuts, hints)
    assert len(pieces.spans) == len(cuts) + 1
    for name in ("prompt_ids", "response_ids", "loss_mask", "reward", "turns"):
        assert getattr(pieces, name) == getattr(whole, name), name


def test_an_agent_that_does_not_do_the_same_again_begins_anew(model: Any, world: Make) -> None:
    def hints(attempt: int) -> list[str]:
        return [f"{'come' if attempt == 1 else 'go'} {turn}" for turn in range(TURNS)]

    whole = play(world, engines(model), [], lambda attempt: hints(2))
    again = play(world, engines(model), [9], hints)
    assert [span.version for span in again.spans] == [2]
    assert again.response_ids == whole.response_ids
    assert again.reward == whole.reward
