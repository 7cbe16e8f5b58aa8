"""Agents with the `openai` client that change their history, ask at once and have sub-agents."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from fakes.agents import WAIT_S, AgentWorld, client, reward
from fakes.closeness import assert_same_logprobs
from fakes.engine import ScriptedEngine
from fakes.fixtures import Closes
from fakes.interrupted import TEMPERATURE, teacher_forced
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

BRANCHING = EnvironmentConfig(kind="agent", branches="train", timeout_s=WAIT_S)
STOPS = [3, *range(6, 101, 5)]  # so many that turns of an untrained model end
Make = Callable[..., AgentWorld]


@pytest.fixture
def world(tiny_model_dir: Path, closes: Closes) -> Make:
    """Makes an endpoint over an engine, for agents whose samples may have branches."""
    torch.set_num_threads(1)

    def make(engine: Engine, stops: Any = (STOP,), **options: Any) -> AgentWorld:
        chosen = settings(
            Chat(load_tokenizer(tiny_model_dir), stops),
            sampling=Sampling(temperature=TEMPERATURE, max_tokens=64),
            max_context=1024,
            branches=options.pop("branches", 8),
        )
        return closes(AgentWorld(engine, chosen, BRANCHING, **options))

    return make


def user(text: str) -> Any:
    return {"role": "user", "content": text}


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


def test_an_agent_that_edits_its_history_is_trained_on_exactly_what_was_sampled(
    world: Make, tiny_model_dir: Path
) -> None:
    """Scenario: edits, compaction and new weights between turns. Result: tokens and logprobs of
    every line are the engine's, by the version that each span names.
    """
    first = load_model(tiny_model_dir, torch.device("cpu"), torch.float32)
    models = {0: first, 1: other_weights(first, 1), 2: other_weights(first, 2)}
    served = load_model(tiny_model_dir, torch.device("cpu"), torch.float32)
    engine = TorchEngine(served, stop_ids=STOPS, slots=2, max_context=1024, seed=5, version=0)
    turns = 0
    loaded = 0

    def update(runner: RolloutRunner) -> None:
        nonlocal loaded
        if loaded < min(turns // 2, 2) and not engine.busy:
            loaded += 1
            named = models[loaded].named_parameters()
            runner.take(load(engine, named, loaded, "recompute"))

    endpoint = world(engine, STOPS, between=update)
    endpoint.add(sample({"prompt": "talk"}))
    work = endpoint.lease()
    told: list[tuple[float, ...]] = []  # logprobs of each turn, as the client saw them

    def say(agent: openai.OpenAI, messages: list[Any]) -> Any:
        nonlocal turns
        completion = agent.chat.completions.create(model="m", messages=messages, logprobs=True)
        (choice,) = completion.choices
        assert choice.logprobs is not None
        told.append(tuple(token.logprob for token in choice.logprobs.content or []))
        turns += 1
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
        say(agent, messages)  # the first history goes on after all
    assert reward(work, 0.5)[0] == 200
    made = endpoint.trajectory()
    assert (made.reward, made.turns, len(made.lines)) == (0.5, 7, 3)
    heard = [{0, 1, 2, 6}, {0, 3, 4}, {5}]  # turns of each line
    for line, own in zip(made.lines, heard, strict=True):
        prompt, tokens = unpack_int32(line.prompt_ids), unpack_int32(line.response_ids)
        mask = torch.tensor(list(line.loss_mask)).bool()
        got = torch.tensor(unpack_float32(line.logprobs))
        expected = torch.cat(
            [teacher_forced(models[s.version], prompt, tokens)[s.start : s.end] for s in line.spans]
        )
        assert_same_logprobs(got[mask], expected[mask], first)
        seen = [value for turn in sorted(own) for value in told[turn]]
        assert torch.equal(got[mask], torch.tensor(seen))
    assert made.newest_version == 2
    assert made.lines[1].prompt_ids == made.lines[0].prompt_ids
    shared = len(told[0])
    assert made.lines[1].response_ids[: 4 * shared] == made.response_ids[: 4 * shared]


def test_sub_agents_at_once(world: Make, tiny_model_dir: Path) -> None:
    """A caller starts three sub-agents with a system prompt of their own and waits for all."""
    tokenizer = load_tokenizer(tiny_model_dir)
    endpoint = world(counting(tokenizer))
    endpoint.add(sample({"prompt": "plan"}))
    work = endpoint.lease()

    async def talk(agent: openai.AsyncOpenAI, messages: list[Any], stream: bool = False) -> str:
        if not stream:
            whole = await agent.chat.completions.create(model="m", messages=messages)
            return whole.choices[0].message.content or ""
        said = ""
        ids: set[str] = set()
        async for event in await agent.chat.completions.create(
            model="m", messages=messages, stream=True
        ):
            ids.add(event.id)
            said += event.choices[0].delta.content or ""
        assert len(ids) == 1
        return said

    async def sub_agent(agent: openai.AsyncOpenAI, name: str) -> str:
        messages = [{"role": "system", "content": "sub"}, user(name)]
        stream = name == "b"
        answer = {"role": "assistant", "content": await talk(agent, messages, stream)}
        return await talk(agent, [*messages, answer, user("more")], stream)

    async def caller() -> list[str]:
        async with openai.AsyncOpenAI(base_url=work["base_url"], api_key="none") as agent:
            messages = [user("plan")]
            answer = {"role": "assistant", "content": await talk(agent, messages)}
            found = await asyncio.gather(*(sub_agent(agent, name) for name in "abc"))
            await talk(agent, [*messages, answer, user(" ".join(found))])
            return found

    assert len(set(asyncio.run(caller()))) == 1
    assert reward(work, 1.0)[0] == 200
    made = endpoint.trajectory()
    assert made.turns == 8
    caller_line, *others = texts(tokenizer, made)
    assert caller_line == "UplanA1.U3 3 3A2."
    assert sorted(others) == [f"UsubU{name}A2.UmoreA3." for name in "abc"]
