"""Agents as they come: OpenAI's newer protocol, Anthropic's client, streams, stops, sampling."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError
from fakes.agents import AgentWorld, client, reward, send
from fakes.chat_templates import chat_tokenizer
from fakes.engine import ScriptedEngine
from fakes.rollouts import STOP, says, settings
from fakes.trajectories import sample

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling, unpack_int32
from umbra.services.config import EnvironmentConfig
from umbra.services.generator.agents.server import url_of
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer

OUTSIDE = EnvironmentConfig(kind="agent")
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION: Any = {"type": "function", "name": "add", "parameters": PARAMETERS}
TOOL: Any = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}
World = Callable[..., AgentWorld]


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def world(tokenizer: Any) -> Iterator[World]:
    """Makes an endpoint whose model says `turns`, one after the other."""
    made: list[AgentWorld] = []

    def make(*turns: str, stops: tuple[str, ...] = (), **options: Any) -> AgentWorld:
        chosen = settings(
            Chat(tokenizer, {STOP}),
            sampling=Sampling(max_tokens=128),
            max_context=2048,
            stops=stops,
        )
        engine = ScriptedEngine(says(tokenizer, *turns))
        made.append(AgentWorld(engine, chosen, OUTSIDE, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def work_of(endpoint: AgentWorld, prompt: str = "go") -> Any:
    endpoint.add(sample({"prompt": prompt}))
    return endpoint.lease()


def sampled(endpoint: AgentWorld, tokenizer: Any) -> tuple[str, str]:
    """The response of the next trajectory, and what of it the model has said."""
    trajectory = endpoint.trajectory()
    response = unpack_int32(trajectory.response_ids)
    said = [t for t, m in zip(response, trajectory.loss_mask, strict=True) if m]
    return tokenizer.decode(response), tokenizer.decode(said)


def test_responses_with_a_tool(world: World, tokenizer: Any) -> None:
    endpoint = world("well " + CALL, "it is 3")
    work = work_of(endpoint)
    history: list[Any] = [{"role": "user", "content": "1+2?"}]
    with client(work) as agent:
        first = agent.responses.create(
            model="m", instructions="Be good.", input=history, tools=[FUNCTION]
        )
        assert first.status == "completed"
        assert first.output_text == "well"
        call = first.output[-1]
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        history += [item.model_dump() for item in first.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        second = agent.responses.create(
            model="m", instructions="Be good.", input=history, tools=[FUNCTION]
        )
        assert second.output_text == "it is 3"
        assert second.usage is not None
        assert second.usage.output_tokens == len("it is 3") + 1
    assert reward(work, 1.0)[0] == 200
    response, said = sampled(endpoint, tokenizer)
    assert said == f"well {CALL}<|end|>it is 3<|end|>"
    assert "<tool_response>3</tool_response>" in response


def test_responses_as_events(world: World) -> None:
    endpoint = world("well " + CALL)
    work = work_of(endpoint)
    with client(work) as agent:
        with agent.responses.stream(model="m", input="go", tools=[FUNCTION]) as stream:
            events = list(stream)
            final = stream.get_final_response()
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert deltas == ["well"]
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert [event.sequence_number for event in events] == sorted(
        {event.sequence_number for event in events}
    )
    call = final.output[1]
    assert call.type == "function_call"
    assert call.arguments == '{"a": 1}'


def anthropic(work: Any, key: str = "none") -> Anthropic:
    return Anthropic(base_url=work["url"], api_key=key, max_retries=0)


def test_messages_with_a_tool(world: World, tokenizer: Any) -> None:
    endpoint = world("well " + CALL, "it is 3", key="secret")
    endpoint.add(sample({"prompt": "go"}))
    work = endpoint.lease(headers={"authorization": "Bearer secret"})
    history: list[Any] = [{"role": "user", "content": "1+2?"}]
    with anthropic(work, "secret") as agent:
        ask = {"model": "m", "max_tokens": 128, "system": "Be good.", "tools": [TOOL]}
        first = agent.messages.create(messages=history, **ask)
        assert first.stop_reason == "tool_use"
        words, use = first.content
        assert words.type == "text"
        assert words.text == "well"
        assert use.type == "tool_use"
        assert (use.name, use.input) == ("add", {"a": 1})
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
        history += [
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ]
        second = agent.messages.create(messages=history, **ask)
        assert second.stop_reason == "end_turn"
        assert second.usage.output_tokens == len("it is 3") + 1
    status, _ = send(
        work["url"] + "/reward", {"reward": 1.0}, headers={"authorization": "Bearer secret"}
    )
    assert status == 200
    response, said = sampled(endpoint, tokenizer)
    assert said == f"well {CALL}<|end|>it is 3<|end|>"
    assert "<tool_response>3</tool_response>" in response


def test_messages_as_events(world: World) -> None:
    endpoint = world("well " + CALL)
    work = work_of(endpoint)
    with anthropic(work) as agent:
        with agent.messages.stream(
            model="m", max_tokens=128, messages=[{"role": "user", "content": "go"}], tools=[TOOL]
        ) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        assert pieces == ["well"]
        assert [block.type for block in final.content] == ["text", "tool_use"]
        assert final.content[1].type == "tool_use"
        assert final.content[1].input == {"a": 1}
        with pytest.raises(BadRequestError, match="history_edited"):
            agent.messages.create(
                model="m", max_tokens=128, messages=[{"role": "user", "content": "other"}]
            )


def test_a_stop_string_ends_the_turn_and_stays_in_its_tokens(world: World, tokenizer: Any) -> None:
    endpoint = world("think. Observation: made up", "42")
    work = work_of(endpoint)
    history: list[Any] = [{"role": "user", "content": "go"}]
    with client(work) as agent:
        first = agent.chat.completions.create(model="m", messages=history, stop=["Observation:"])
        assert first.choices[0].finish_reason == "stop"
        assert first.choices[0].message.content == "think. "
        history += [first.choices[0].message, {"role": "user", "content": "Observation: 42"}]
        second = agent.chat.completions.create(
            model="m", messages=history, stop=["Observation:"], stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in second if c.choices) == "42"
    assert reward(work, 1.0)[0] == 200
    response, said = sampled(endpoint, tokenizer)
    # The template ends the turn, as the model did not.
    assert said == "think. Observation:42<|end|>"
    assert response.startswith("think. Observation:<|end|><|user|>Observation: 42")


def test_plain_text_goes_on_after_a_stop_string_of_the_run(world: World, tokenizer: Any) -> None:
    endpoint = world("think. Observation: made up", "x", stops=("Observation:",))
    work = work_of(endpoint)
    with client(work) as agent:
        first = agent.completions.create(model="m", prompt="Go <|assistant|>")
        assert (first.choices[0].text, first.choices[0].finish_reason) == ("think. ", "stop")
        prompt = "Go <|assistant|>think. Observation: 42 <|assistant|>"
        agent.completions.create(model="m", prompt=prompt)
    assert reward(work, 1.0)[0] == 200
    assert sampled(endpoint, tokenizer)[0].startswith("think. Observation: 42 <|assistant|>")


def test_reasoning_is_returned_and_taken_back() -> None:
    """With or without it, the history is the same: the tokens are those that were sampled."""
    tokenizer, stops = chat_tokenizer("qwen3")
    chat = Chat(tokenizer, stops)
    turns = ["<think>\nhm\n</think>\n\nyes<|im_end|>", "<think>\nso\n</think>\n\nno<|im_end|>"]
    ids = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
    cue = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]

    def script(given: Any) -> list[int]:
        begun = [i for i in range(len(given)) if list(given[i : i + len(cue)]) == cue]
        return ids[len(begun) - 1][len(given) - begun[-1] - len(cue) :]

    engine = ScriptedEngine(script, stop_ids=chat.stop_ids, max_context=4096)
    options = settings(chat, max_context=4096, sampling=Sampling(max_tokens=64))
    endpoint = AgentWorld(engine, options, OUTSIDE)
    try:
        work = work_of(endpoint)
        url = f"{work['base_url']}/chat/completions"
        asked: list[Any] = [{"role": "user", "content": "a"}]
        status, first = send(url, {"messages": asked})
        assert status == 200
        message = first["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
        del message["reasoning_content"]
        asked += [message, {"role": "user", "content": "b"}]
        with anthropic(work) as agent:  # another protocol, the same session
            second = agent.messages.create(model="m", max_tokens=50, messages=asked)
        assert [block.type for block in second.content] == ["thinking", "text"]
        asked.append({"role": "assistant", "content": "no", "reasoning_content": "other"})
        status, refused = send(url, {"messages": [*asked, {"role": "user", "content": "c"}]})
        assert (status, refused["error"]["code"]) == (400, "history_edited")
        assert reward(work, 1.0)[0] == 200
        _, said = sampled(endpoint, tokenizer)
        assert said == "".join(turns)
    finally:
        endpoint.close()


def test_agents_in_containers_are_told_an_address_that_they_reach(world: World) -> None:
    endpoint = world("yes", advertise="host.docker.internal")
    port = endpoint.pool._server._bound.getsockname()[1]
    here = f"http://127.0.0.1:{port}"
    told = f"http://host.docker.internal:{port}"
    assert endpoint.url == told
    endpoint.add(sample({"prompt": "go"}))
    called = {"host": f"host.docker.internal:{port}"}  # as a client there says
    status, work = send(f"{here}/sessions", {"wait_s": 10.0}, headers=called)
    assert status == 201
    assert work["base_url"] == f"{told}/sessions/{work['id']}/v1"
    status, refused = send(f"{here}/sessions", {"wait_s": 0}, headers={"host": "evil.example"})
    assert (status, refused["error"]["code"]) == (403, "wrong_host")
    bound = endpoint.pool._server._bound
    assert url_of(bound, "proxy.example:8443") == "http://proxy.example:8443"
    for wrong in ("http://a", "a:b", "a/b", "u@a"):
        with pytest.raises(UsageError, match="serve_advertise"):
            url_of(bound, wrong)
