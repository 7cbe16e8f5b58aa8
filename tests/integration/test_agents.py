"""Agents written with the `openai` client, against the real endpoint and engine."""

import http.client
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import repeat
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
from fakes.agents import WAIT_S, AgentWorld, client, reward, send
from fakes.engine import ScriptedEngine
from fakes.rollouts import STOP, says, settings
from fakes.slowness import seconds
from fakes.trajectories import sample
from fakes.waiting import until

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling, unpack_int32
from umbra.services.config import EnvironmentConfig
from umbra.services.generator.agents import server
from umbra.services.generator.agents.server import MAX_BODY, bind, url_of
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_tokenizer

OUTSIDE = EnvironmentConfig(kind="agent")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
World = Callable[..., AgentWorld]


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Any:
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def world(tokenizer: Any) -> Iterator[World]:
    """Makes an endpoint whose model says `turns`, one after the other."""
    made: list[AgentWorld] = []

    def make(*turns: str, environment: EnvironmentConfig = OUTSIDE, **options: Any) -> AgentWorld:
        chosen = settings(
            Chat(tokenizer, {STOP}),
            sampling=Sampling(max_tokens=options.pop("max_tokens", 128)),
            max_context=options.pop("max_context", 2048),
            **{name: options.pop(name) for name in ("limits", "clock") if name in options},
        )
        engine = options.pop("engine", None) or ScriptedEngine(says(tokenizer, *turns))
        made.append(AgentWorld(engine, chosen, environment, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_an_agent_with_tools_makes_a_trajectory(world: World, tokenizer: Any) -> None:
    endpoint = world(CALL, "it is 3")
    endpoint.add(sample({"prompt": "1+2?", "answer": "3"}))
    work = endpoint.lease()
    assert work["row"] == {"prompt": "1+2?", "answer": "3"}
    messages: list[Any] = [user(work["row"]["prompt"])]
    with client(work) as agent:
        first = agent.chat.completions.create(model="any", messages=messages, tools=[TOOL])
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.arguments == '{"a": 1}'
        messages.append(choice.message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        second = agent.chat.completions.create(model="any", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "it is 3"
    assert second.choices[0].finish_reason == "stop"
    assert reward(work, 1.0, calls=1.0)[0] == 200
    trajectory = endpoint.trajectory()
    assert (trajectory.reward, trajectory.turns) == (1.0, 2)
    assert trajectory.reward_parts == {"calls": 1.0}
    prompt, response = unpack_int32(trajectory.prompt_ids), unpack_int32(trajectory.response_ids)
    assert first.usage is not None
    assert first.usage.prompt_tokens == len(prompt)
    assert first.usage.completion_tokens == len(CALL) + 1
    assert second.usage is not None
    assert second.usage.total_tokens == len(prompt) + len(response)
    text = tokenizer.decode(response)
    assert text == (
        f"{CALL}<|end|><|user|><tool_response>3</tool_response><|assistant|>it is 3<|end|>"
    )
    said = tokenizer.decode([t for t, m in zip(response, trajectory.loss_mask, strict=True) if m])
    assert said == f"{CALL}<|end|>it is 3<|end|>"
    assert "add" in tokenizer.decode(prompt)


def ask(work: Any, *messages: dict[str, Any], **fields: Any) -> tuple[int, Any]:
    return send(f"{work['base_url']}/chat/completions", {"messages": list(messages), **fields})


@pytest.mark.parametrize("silent_s", [15.0, 0.0])
def test_an_answer_comes_as_events_too(
    world: World, silent_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENT_S", silent_s)  # 0: comments come before the reply
    endpoint = world("well " + CALL, "done")
    endpoint.add(sample({"prompt": "go"}))
    work = endpoint.lease()
    with client(work) as agent:
        stream = agent.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "go"}],
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
        chunks = list(stream)
    calls, last, usage = chunks
    assert (calls.choices[0].delta.role, calls.choices[0].delta.content) == ("assistant", "well")
    assert calls.choices[0].delta.tool_calls is not None
    function = calls.choices[0].delta.tool_calls[0].function
    assert function is not None
    assert (function.name, function.arguments) == ("add", '{"a": 1}')
    assert calls.choices[0].logprobs is not None
    assert last.choices[0].finish_reason == "tool_calls"
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len("well " + CALL) + 1
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(
    ("value", "parts"),
    [("much", {}), (None, {}), (True, {}), (1.0, {"a": "b"}), (1e999, {})],
)
def test_a_reward_that_is_none_is_refused(world: World, value: Any, parts: Any) -> None:
    endpoint = world("yes")
    endpoint.add(sample({"prompt": "go"}))
    work = endpoint.lease()
    assert ask(work, user("go"))[0] == 200
    assert reward(work, value, **parts)[0] == 400
    assert reward(work, 2.0)[0] == 200
    assert endpoint.trajectory().reward == 2.0


def test_nonsense_costs_nothing(world: World) -> None:
    endpoint = world("yes")
    endpoint.add(sample({"prompt": "go"}))
    work = endpoint.lease()
    url = f"{work['base_url']}/chat/completions"
    for body in (b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000):
        status, refused = send(url, body)
        assert (status, refused["error"]["type"]) == (400, "invalid_request_error")
    assert send(url, b"{}", headers={"content-type": "text/plain"})[0] == 415
    assert send(url, method="GET")[0] == 405
    assert send(f"{work['base_url']}/embeddings", {})[0] == 404
    status, refused = send(f"{endpoint.url}/sessions/nobody/v1/chat/completions", {})
    assert (status, refused["error"]["code"]) == (404, "session_not_found")
    status, refused = send(f"{endpoint.url}/v1/chat/completions", {})
    assert "POST /sessions" in refused["error"]["message"]
    assert send(f"{endpoint.url}/sessions", {"wait_s": "long"})[0] == 400
    status, refused = send(f"{endpoint.url}/sessions", {"wait_s": 0})
    assert (status, refused["error"]["code"]) == (503, "no_work")
    with client(work) as agent, pytest.raises(openai.BadRequestError, match="n = 2") as no:
        agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}], n=2)
    assert no.value.param == "n"
    assert ask(work, user("go"))[0] == 200
    assert reward(work, 1.0)[0] == 200
    assert endpoint.trajectory().turns == 1


def test_a_body_that_is_too_long_is_refused(world: World) -> None:
    """By its length before it is read, or when it gets there, if it says none."""
    endpoint = world("yes")
    host, port = endpoint.url.removeprefix("http://").split(":")

    def post(*headers: str, body: Iterator[bytes]) -> tuple[int, str]:
        with closing(http.client.HTTPConnection(host, int(port), timeout=WAIT_S)) as connection:
            connection.putrequest("POST", "/sessions")
            for header in ("content-type: application/json", *headers):
                connection.putheader(*header.split(": "))
            connection.endheaders()
            with suppress(ConnectionError):  # nobody reads the rest
                for piece in body:
                    connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            answer = connection.getresponse()
            return answer.status, json.load(answer)["error"]["code"]

    refused = (413, "too_large")
    assert post(f"content-length: {MAX_BODY + 1}", body=iter(())) == refused
    pieces = repeat(b" " * 65536, MAX_BODY // 65536 + 1)
    assert post("transfer-encoding: chunked", body=pieces) == refused


def test_the_base_url_is_where_the_endpoint_is_whatever_its_name_in_a_request(world: World) -> None:
    endpoint = world("yes")
    endpoint.add(sample({"prompt": "go"}))
    forwarded = {"x-forwarded-host": "evil.example", "x-forwarded-proto": "https"}
    work = endpoint.lease(headers={"host": "localhost:1", **forwarded})
    assert work["base_url"] == f"{endpoint.url}/sessions/{work['id']}/v1"
    assert work["url"] == f"{endpoint.url}/sessions/{work['id']}"
    for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        status, refused = send(f"{endpoint.url}/sessions", {"wait_s": 0}, headers=headers)
        assert (status, refused["error"]["code"][:6]) == (403, "wrong_")


def test_it_stops_while_agents_wait_for_work(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = world("yes")
    answers = list[Any]()
    url = f"{endpoint.url}/sessions"
    waiting = Thread(target=lambda: answers.append(send(url, {"wait_s": 60.0})))
    waiting.start()
    until(lambda: endpoint.pool._arrivals, "the session is asked for")
    endpoint.close()
    waiting.join(WAIT_S)
    assert [(status, said["error"]["code"]) for status, said in answers] == [(503, "no_work")]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_what_is_too_long_is_refused_and_the_reward_still_counts(world: World) -> None:
    endpoint = world("yes", "no", max_context=64)
    endpoint.add(sample({"prompt": "go"}))
    work = endpoint.lease()
    status, refused = ask(work, user("x" * 70))
    assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
    assert "context length" in refused["error"]["message"], "which agents look for"
    status, said = ask(work, user("go"))
    assert status == 200
    answer = said["choices"][0]["message"]
    status, refused = ask(work, user("go"), answer, user("x" * 70))
    assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
    assert "context length" in refused["error"]["message"], "which agents look for"
    assert "only the reward can follow" in refused["error"]["message"]
    assert reward(work, 0.25)[0] == 200
    trajectory = endpoint.trajectory()
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (0.25, 1, "stop")


def test_an_agent_that_dies_loses_its_sample(world: World) -> None:
    patience_s = seconds(0.5)  # all that the agent does must be done in that
    impatient = EnvironmentConfig(kind="agent", timeout_s=patience_s)
    endpoint = world("yes", environment=impatient)
    endpoint.add(sample({"prompt": "go"}))
    work = endpoint.lease()
    assert ask(work, user("go"))[0] == 200
    assert ask(work, user("other"))[0] == 400  # nonsense is no sign of life
    failed = endpoint.failed()
    assert failed.failed
    told = f"asked for nothing for environment.timeout_s = {patience_s:g} s after turn 1"
    assert told in failed.reason
    status, refused = reward(work, 1.0)
    assert (status, refused["error"]["code"]) == (410, "session_over")
    assert "asked for nothing" in refused["error"]["message"]


def test_an_agent_can_give_up(world: World) -> None:
    endpoint = world("yes")
    endpoint.add(sample({"prompt": "go"}))
    work = endpoint.lease()
    assert send(work["url"], {"reason": "no disk"}, method="DELETE")[0] == 200
    assert endpoint.failed().reason == "its agent gave up: no disk"
    assert ask(work, user("go"))[0] == 410


def test_a_sample_that_is_taken_back_ends_its_session(world: World) -> None:
    endpoint = world("yes")
    endpoint.add(sample({"prompt": "go"}))
    work = endpoint.lease()
    assert ask(work, user("go"))[0] == 200
    endpoint.drop("s", 1)
    status, refused = ask(work, user("go"), {"role": "assistant", "content": "yes"}, user("on"))
    assert (status, refused["error"]["code"]) == (410, "session_over")


def test_a_key_is_asked_for_everywhere(world: World) -> None:
    endpoint = world("yes", key="secret")
    endpoint.add(sample({"prompt": "go"}))
    right = {"authorization": "Bearer secret"}
    for headers in ({}, {"authorization": "Bearer wrong"}):
        status, refused = send(f"{endpoint.url}/sessions", {"wait_s": 0}, headers=headers)
        assert (status, refused["error"]["code"]) == (401, "invalid_api_key")
    work = endpoint.lease(headers=right)
    assert ask(work, user("go"))[0] == 401
    with client(work, api_key="secret") as agent:
        agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])
    assert reward(work, 1.0)[0] == 401
    assert send(f"{work['url']}/reward", {"reward": 1.0}, headers=right)[0] == 200
    assert endpoint.trajectory().reward == 1.0


def test_who_may_come_is_decided_before_anything_is_served(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="UMBRA_AGENT_KEY"):
        bind("0.0.0.0:0", "")
    for address in ("8000", "host", "127.0.0.1:99999", ":80"):
        with pytest.raises(UsageError, match="HOST:PORT"):
            bind(address, "key")
    with closing(bind("127.0.0.1:0", "")) as first:
        port = first.getsockname()[1]
        with closing(bind(f"127.0.0.1:{port}", "")) as second:  # the next port that is free
            assert second.getsockname()[1] > port
    with closing(bind("0.0.0.0:0", "key")) as anywhere:
        assert url_of(anywhere).startswith("http://127.0.0.1:")
