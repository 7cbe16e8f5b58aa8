"""What an agent's trajectory records is what was sampled, whatever happens on the way."""

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.agents import WAIT_S, AgentWorld, client, reward, send
from fakes.rollouts import sample

from umbra.proto.messages import ReturnedSample
from umbra.proto.records import (
    Sampling,
    Trajectory,
    unpack_float32,
    unpack_int32,
)
from umbra.services.generator.rollout import RolloutSettings
from umbra.services.generator.runner import RolloutRunner
from umbra.services.generator.torch_engine import TorchEngine
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_model, load_tokenizer
from umbra.services.runtime.config import Environment

STOPS = [3, *range(6, 101, 5)]  # so many that turns end, of 7, 13 and 10 tokens when greedy
TEMPERATURE = 0.7
TURNS = 3


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model(tiny_model_dir: Path) -> Any:
    return load_model(tiny_model_dir, torch.device("cpu"), torch.float32)


Make = Callable[..., AgentWorld]


@pytest.fixture
def world(tiny_model_dir: Path) -> Iterator[Make]:
    """Makes an endpoint over an engine."""
    made: list[AgentWorld] = []
    chat = Chat(load_tokenizer(tiny_model_dir), STOPS)

    def make(engine: TorchEngine, temperature: float, **options: Any) -> AgentWorld:
        sampling = Sampling(temperature=temperature, max_tokens=200)
        settings = RolloutSettings(chat, sampling, engine.max_context, agents=True)
        made.append(AgentWorld(engine, settings, Environment(kind="agent"), **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def engine_of(model: Any, version: int = 0) -> TorchEngine:
    return TorchEngine(model, stop_ids=STOPS, slots=2, max_context=1024, seed=5, version=version)


def other_weights(model: Any, seed: int) -> Any:
    changed = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return changed


@torch.no_grad()
def teacher_forced(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logprobs of `tokens` [T] in one forward pass."""
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    index = torch.tensor(tokens)[:, None]
    return torch.log_softmax(logits / TEMPERATURE, -1).gather(1, index)[:, 0]


def test_tokens_and_logprobs_are_those_of_the_engine_while_weights_change(
    model: Any, world: Make, tiny_model_dir: Path
) -> None:
    models = {0: copy.deepcopy(model), **{v: other_weights(model, v) for v in (1, 2, 3)}}
    engine = engine_of(model)
    due = [(3, 1), (11, 2), (12, 3)]  # (after so many tokens, version)

    def update(runner: RolloutRunner) -> None:
        if due and engine.decoded_tokens >= due[0][0]:
            _, version = due.pop(0)
            runner.take(
                engine.load_weights(models[version].named_parameters(), version, "recompute")
            )

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
    assert torch.allclose(got[mask], expected[mask], atol=1e-4)
    assert torch.equal(got[mask], torch.tensor(logprobs))
    # Whoever had tokenised the messages again would have trained on other tokens.
    tokenizer = load_tokenizer(tiny_model_dir)
    history = [m if isinstance(m, dict) else m.model_dump() for m in messages[:-1]]
    again = tokenizer(
        tokenizer.apply_chat_template(history, tokenize=False), add_special_tokens=False
    )["input_ids"]
    assert again != [*prompt, *tokens]


def converse(endpoint: AgentWorld, hints: list[str]) -> bool:
    """An agent of `TURNS` turns; whether it came to its end."""
    work = endpoint.lease()
    messages: list[Any] = [{"role": "user", "content": work["row"]["prompt"]}]
    for hint in hints:
        status, said = send(work["base_url"] + "/chat/completions", {"messages": messages})
        if status == 410:
            return False
        assert status == 200, said
        messages += [said["choices"][0]["message"], {"role": "user", "content": hint}]
    assert reward(work, float(len(messages)))[0] == 200
    return True


class Interruption:
    """Takes all samples back once the engine has decoded so many tokens."""

    def __init__(self, engine: TorchEngine, cut: int) -> None:
        self.begun = False
        self.over = threading.Event()
        self.returned: list[ReturnedSample] = []
        self._engine = engine
        self._cut = cut

    def __call__(self, runner: RolloutRunner) -> None:
        if not self.begun and self._engine.decoded_tokens >= self._cut:
            self.begun = True
            self.returned = runner.drain("next")
            self.over.set()


def play(model: Any, world: Make, cuts: list[int], hints: Callable[[int], list[str]]) -> Trajectory:
    """The greedy trajectory of an agent that a new generator goes on with after each cut."""
    partial = None
    for attempt, cut in enumerate([*cuts, 10_000], start=1):
        engine = engine_of(model, version=attempt)
        interruption = Interruption(engine, cut)
        endpoint = world(engine, 0.0, between=interruption)
        endpoint.add(sample({"prompt": "talk"}, attempt=attempt, partial=partial))
        while not interruption.begun:  # a sample that begins anew has another session
            if converse(endpoint, hints(attempt)):
                return endpoint.trajectory()
        assert interruption.over.wait(WAIT_S)
        partial = interruption.returned[0].partial
    raise AssertionError("it does not end")


@pytest.mark.parametrize("cuts", [[1], [7], [9], [4, 8, 6]])
def test_a_sample_goes_on_token_for_token_on_another_generator(
    model: Any, world: Make, cuts: list[int]
) -> None:
    def hints(attempt: int) -> list[str]:
        del attempt
        return [f"go {turn}" for turn in range(TURNS)]

    whole = play(model, world, [], hints)
    pieces = play(model, world, cuts, hints)
    assert len(pieces.spans) == len(cuts) + 1
    for name in ("prompt_ids", "response_ids", "loss_mask", "reward", "turns"):
        assert getattr(pieces, name) == getattr(whole, name), name


def test_an_agent_that_does_not_do_the_same_again_begins_anew(model: Any, world: Make) -> None:
    def hints(attempt: int) -> list[str]:
        return [f"{'come' if attempt == 1 else 'go'} {turn}" for turn in range(TURNS)]

    whole = play(model, world, [], lambda attempt: hints(2))
    again = play(model, world, [9], hints)
    assert [span.version for span in again.spans] == [2]
    assert again.response_ids == whole.response_ids
    assert again.reward == whole.reward
