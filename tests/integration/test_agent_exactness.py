"""An agent's trajectory records the sampled tokens, whatever happens on the way."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from fakes.agents import AgentWorld, Make, client, play, reward
from fakes.closeness import assert_same_logprobs
from fakes.engine import ScriptedEngine
from fakes.fixtures import Closes
from fakes.interrupted import TEMPERATURE, TURNS, teacher_forced
from fakes.rollouts import STOP, settings
from fakes.trajectories import sample
from fakes.versions import load, other_weights

from umbra.proto.records import Sampling, Trajectory, unpack_float32, unpack_int32
from umbra.services.config import EnvironmentConfig
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_model
from umbra.services.modeling.pretrained import load_tokenizer

STOPS = [3, *range(6, 101, 5)]  # so many that turns end, of 7, 13 and 10 tokens when greedy


@pytest.fixture
def world(tiny_model_dir: Path, closes: Closes) -> Make:
    """Makes an endpoint over an engine; with `branches`, samples may have so many."""

    def make(
        engine: Engine, temperature: float = TEMPERATURE, *, branches: int = 1, **options: Any
    ) -> AgentWorld:
        chosen = settings(
            Chat(load_tokenizer(tiny_model_dir), options.pop("stops", STOPS)),
            sampling=Sampling(temperature=temperature, max_tokens=200),
            max_context=1024,
            branches=branches,
        )
        kind = EnvironmentConfig(kind="agent", branches="train" if branches > 1 else "refuse")
        return closes(AgentWorld(engine, chosen, kind, **options))

    return make


def engines(model: Any) -> Callable[[int], TorchEngine]:
    options: Any = {"stop_ids": STOPS, "slots": 2, "max_context": 1024, "seed": 5}
    return lambda attempt: TorchEngine(model, **options, version=attempt)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def test_each_line_has_the_tokens_and_logprobs_of_the_version_that_each_span_names(
    world: Make, tiny_model_dir: Path
) -> None:
    """New weights come within turns and between; the agent edits and compacts its history."""
    first = load_model(tiny_model_dir, torch.device("cpu"), torch.float32)
    models = {0: first, **{version: other_weights(first, version) for version in (1, 2, 3, 4)}}
    engine = engines(load_model(tiny_model_dir, torch.device("cpu"), torch.float32))(0)
    due = [(3, 1), (11, 2), (12, 3), (40, 4)]  # (after so many tokens, version)

    def update(runner: RolloutRunner) -> None:
        if due and engine.decoded_tokens >= due[0][0]:
            _, version = due.pop(0)
            load(engine, models[version].named_parameters(), version, "recompute")

    endpoint = world(engine, branches=8, between=update)
    endpoint.add(sample({"prompt": "talk"}))
    work = endpoint.lease()
    told: list[tuple[float, ...]] = []  # logprobs of each turn, as the client saw them
    fingerprints: list[str | None] = []

    def say(agent: openai.OpenAI, messages: list[Any]) -> Any:
        completion = agent.chat.completions.create(
            model="m", messages=messages, logprobs=True, temperature=TEMPERATURE
        )
        (choice,) = completion.choices
        assert choice.logprobs is not None
        told.append(tuple(token.logprob for token in choice.logprobs.content or []))
        fingerprints.append(completion.system_fingerprint)
        return choice.message

    with client(work) as agent:
        messages: list[Any] = [user("talk")]
        for turn in range(3):
            messages += [say(agent, messages), user(f"go {turn}")]
        edited = [*messages[:2], user("rather this")]  # behind the first turn
        edited += [say(agent, edited), user("and that")]
        say(agent, edited)
        compact = [user("talk"), user("much was said"), user("now end")]
        say(agent, compact)
        messages.append(say(agent, messages))  # the first history goes on after all
    assert reward(work, 0.5)[0] == 200
    made = endpoint.trajectory()
    assert (made.reward, made.turns, len(made.lines)) == (0.5, 7, 3)
    assert not due
    assert [span.version for span in made.spans[:4]] == [0, 1, 2, 3]
    heard = [{0, 1, 2, 6}, {0, 3, 4}, {5}]  # turns of each line
    for line, own in zip(made.lines, heard, strict=True):
        prompt, tokens = unpack_int32(line.prompt_ids), unpack_int32(line.response_ids)
        assert [s.start for s in line.spans] == [0, *(s.end for s in line.spans[:-1])]
        assert line.spans[-1].end == len(tokens)
        mask = torch.tensor(list(line.loss_mask)).bool()
        got = torch.tensor(unpack_float32(line.logprobs))
        expected = torch.cat(
            [teacher_forced(models[s.version], prompt, tokens)[s.start : s.end] for s in line.spans]
        )
        assert_same_logprobs(got[mask], expected[mask], first)
        seen = [value for turn in sorted(own) for value in told[turn]]
        assert torch.equal(got[mask], torch.tensor(seen))
    assert made.newest_version == 4 and fingerprints[-1] == "version-4"
    assert made.lines[1].prompt_ids == made.lines[0].prompt_ids
    shared = len(told[0])
    assert made.lines[1].response_ids[: 4 * shared] == made.response_ids[: 4 * shared]
    # Whoever had tokenised the messages again would have trained on other tokens.
    tokenizer = load_tokenizer(tiny_model_dir)
    history = [m if isinstance(m, dict) else m.model_dump() for m in messages]
    again = tokenizer(
        tokenizer.apply_chat_template(history, tokenize=False), add_special_tokens=False
    )["input_ids"]
    assert again != [*unpack_int32(made.prompt_ids), *unpack_int32(made.response_ids)]


@pytest.mark.parametrize("cuts", [[9], [4, 8, 6]])
def test_a_sample_goes_on_token_for_token_on_another_generator(
    model: Any, world: Make, cuts: list[int]
) -> None:
    hints = [f"go {turn}" for turn in range(TURNS)]
    whole = play(world, engines(model), [], lambda _: hints)
    pieces = play(world, engines(model), cuts, lambda _: hints)
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


def counting(tokenizer: Any) -> ScriptedEngine:
    """Says how many tokens of the user's it sees, whatever else was asked before."""
    mark = tokenizer.convert_tokens_to_ids("<|user|>")
    assistant = tokenizer.convert_tokens_to_ids("<|assistant|>")

    def script(ids: Any) -> list[int]:
        seen = list(ids)
        said = len(seen) - 1 - max(i for i, token in enumerate(seen) if token == assistant)
        text = tokenizer(str(seen.count(mark)), add_special_tokens=False)["input_ids"]
        return [*text, STOP][said:]

    return ScriptedEngine(script, slots=8, max_context=1024)


def texts(tokenizer: Any, made: Trajectory) -> list[str]:
    return [
        tokenizer.decode([*unpack_int32(line.prompt_ids), *unpack_int32(line.response_ids)])
        .replace("<|user|>", "U").replace("<|assistant|>", "A").replace("<|end|>", ".")
        for line in made.lines
    ]  # fmt: skip


async def talk(agent: openai.AsyncOpenAI, messages: list[Any], stream: bool = False) -> str:
    said: Any = await agent.chat.completions.create(model="m", messages=messages, stream=stream)
    if not stream:
        return said.choices[0].message.content
    events = [event async for event in said]
    assert len({event.id for event in events}) == 1
    return "".join(event.choices[0].delta.content or "" for event in events)


async def sub_agent(agent: openai.AsyncOpenAI, name: str) -> str:
    messages = [{"role": "system", "content": "sub"}, user(name)]
    stream = name == "b"
    answer = {"role": "assistant", "content": await talk(agent, messages, stream)}
    return await talk(agent, [*messages, answer, user("more")], stream)


async def caller(base_url: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as agent:
        messages = [user("plan")]
        answer = {"role": "assistant", "content": await talk(agent, messages)}
        found = await asyncio.gather(*(sub_agent(agent, name) for name in "abc"))
        await talk(agent, [*messages, answer, user(" ".join(found))])
        return found


def test_sub_agents_at_once(world: Make, tiny_model_dir: Path) -> None:
    """A caller starts three sub-agents with a system prompt of their own and waits for all."""
    tokenizer = load_tokenizer(tiny_model_dir)
    endpoint = world(counting(tokenizer), branches=8, stops=(STOP,))
    endpoint.add(sample({"prompt": "plan"}))
    work = endpoint.lease()
    assert len(set(asyncio.run(caller(work["base_url"])))) == 1
    assert reward(work, 1.0)[0] == 200
    made = endpoint.trajectory()
    assert made.turns == 8
    caller_line, *others = texts(tokenizer, made)
    assert caller_line == "UplanA1.U3 3 3A2."
    assert sorted(others) == [f"UsubU{name}A2.UmoreA3." for name in "abc"]
