"""Agents written with the clients of OpenAI and Anthropic, against the real endpoint and engine."""

import json
import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from socket import create_connection
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import openai
import pytest
import torch
from fakes.agents import KEY, WAIT_S, AgentWorld, ask, client, reward, send, user
from fakes.closeness import assert_same_logprobs
from fakes.engine import ScriptedEngine
from fakes.fixtures import Closes
from fakes.interrupted import TEMPERATURE, TURNS, teacher_forced
from fakes.rollouts import STOP, says, settings
from fakes.slowness import until
from fakes.trajectories import sample
from fakes.versions import load, other_weights

from umbra.proto.errors import UsageError
from umbra.proto.messages import ReturnedSample
from umbra.proto.records import Sampling, Trajectory, unpack_float32, unpack_int32
from umbra.services.config import EnvironmentConfig
from umbra.services.generator.agents import pool
from umbra.services.generator.agents.pool import bind, url_of
from umbra.services.generator.engines.engine import Engine
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.generator.runner import RolloutRunner
from umbra.services.modeling.chat import Chat
from umbra.services.modeling.models import load_model

if TYPE_CHECKING:
    from anthropic import Anthropic

STOPS = [3, *range(6, 101, 5)]  # so many that turns end, of 7, 13 and 10 tokens when greedy
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION: Any = {"type": "function", "name": "add", "parameters": PARAMETERS}
BLOCK_TOOL: Any = {"name": "add", "description": "Add.", "input_schema": PARAMETERS}
ADD = {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS, "strict": True}
TOOL: Any = {"type": "function", "function": ADD}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
World = Callable[..., AgentWorld]


@pytest.fixture
def world(tokenizer: Any, closes: Closes) -> World:
    """Makes an endpoint whose model says `turns`, one after the other, or whose engine is given."""

    def make(
        *turns: str,
        engine: Engine | None = None,
        temperature: float = 1.0,
        max_context: int = 2048,
        branches: int = 1,
        **options: Any,
    ) -> AgentWorld:
        chosen = settings(
            Chat(tokenizer, STOPS if engine else {STOP}),
            sampling=Sampling(temperature=temperature, max_tokens=200),
            max_context=max_context,
            branches=branches,
        )
        how = "train" if branches > 1 else "refuse"
        kind = EnvironmentConfig(kind="agent", timeout_s=WAIT_S, branches=how)
        engine = engine or ScriptedEngine(says(tokenizer, *turns))
        return closes(AgentWorld(engine, chosen, kind, **options))

    return make


def anthropic(work: Any) -> "Anthropic":
    from anthropic import Anthropic  # seconds of a core, here for those who need it

    return Anthropic(base_url=work["url"], api_key=KEY, max_retries=0)


class Said(NamedTuple):
    """Two turns of an agent, the first of which calls a tool whose answer is 3."""

    text: str | None
    name: str
    arguments: str
    end: str | None
    tokens: tuple[int, int]  # of the last prompt, of the last turn


def by_chat(work: Any, stream: bool) -> Said:
    history: list[Any] = [{"role": "system", "content": "Be good."}, user("1+2?")]
    with client(work) as agent:

        def say() -> Any:
            asked = {"model": "any", "messages": history, "tools": [TOOL], "logprobs": True}
            if not stream:
                return agent.chat.completions.create(**asked)
            asked["stream_options"] = {"include_usage": True}
            with agent.chat.completions.stream(**asked) as events:
                chunks = [event.chunk for event in events if event.type == "chunk"]
                assert len({chunk.id for chunk in chunks}) == 1
                return events.get_final_completion()

        (choice,) = say().choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        history += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
        second = say()
    (last,) = second.choices
    assert last.finish_reason == "stop"
    tokens = (second.usage.prompt_tokens, second.usage.completion_tokens)
    assert second.usage.total_tokens == sum(tokens)
    assert len(last.logprobs.content) == tokens[1]
    function = call.function
    return Said(
        choice.message.content, function.name, function.arguments, last.message.content, tokens
    )


def by_responses(work: Any, stream: bool) -> Said:
    history: list[Any] = [user("1+2?")]
    with client(work) as agent:

        def say() -> Any:
            asked: Any = {"model": "m", "instructions": "Be good.", "tools": [FUNCTION]}
            if not stream:
                return agent.responses.create(input=history, **asked)
            with agent.responses.stream(input=history, **asked) as events:
                heard = list(events)
                final = events.get_final_response()
            numbers = [event.sequence_number for event in heard]
            assert numbers == sorted(set(numbers))
            deltas = [e.delta for e in heard if e.type == "response.output_text.delta"]
            assert "".join(deltas) == final.output_text
            return final

        first = say()
        assert first.status == "completed"
        assert [item.type for item in first.output] == ["message", "function_call"]
        call = first.output[-1]
        history += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
        second = say()
    tokens = (second.usage.input_tokens, second.usage.output_tokens)
    return Said(first.output_text, call.name, call.arguments, second.output_text, tokens)


def by_messages(work: Any, stream: bool) -> Said:
    history: list[Any] = [user("1+2?")]
    with anthropic(work) as agent:

        def say() -> Any:
            asked: Any = {"max_tokens": 128, "system": "Be good.", "tools": [BLOCK_TOOL]}
            if not stream:
                return agent.messages.create(model="m", messages=history, **asked)
            with agent.messages.stream(model="m", messages=history, **asked) as events:
                pieces = "".join(events.text_stream)
                final = events.get_final_message()
            assert pieces == getattr(final.content[0], "text", None)
            return final

        first = say()
        assert first.stop_reason == "tool_use"
        words, use = first.content
        assert (words.type, use.type) == ("text", "tool_use")
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
        history += [{"role": "assistant", "content": first.content}, user([result])]
        second = say()
    assert second.stop_reason == "end_turn"
    tokens = (second.usage.input_tokens, second.usage.output_tokens)
    return Said(words.text, use.name, json.dumps(use.input), second.content[0].text, tokens)


@pytest.mark.parametrize("talk", [by_chat, by_responses, by_messages])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_a_tool_makes_a_trajectory(
    world: World,
    tokenizer: Any,
    talk: Callable[[Any, bool], Said],
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "SILENT_S", 0.0)  # comments come before the events of a reply
    endpoint = world("well " + CALL, "it is 3", key=KEY)
    endpoint.add(sample({"prompt": "1+2?", "answer": "3"}))
    work = endpoint.lease()
    assert work["row"] == {"prompt": "1+2?", "answer": "3"}
    said = talk(work, stream)
    assert said[:4] == ("well", "add", '{"a": 1}', "it is 3")
    assert reward(work, 1.0, calls=1.0) == 200
    made = endpoint.trajectory()
    assert (made.reward, made.turns, made.reward_parts) == (1.0, 2, {"calls": 1.0})
    prompt, response = unpack_int32(made.prompt_ids), unpack_int32(made.response_ids)
    own = len("it is 3") + 1
    assert said.tokens == (len(prompt) + len(response) - own, own)
    answer = "<|end|><|user|><tool_response>3</tool_response><|assistant|>"
    assert tokenizer.decode(response) == f"well {CALL}{answer}it is 3<|end|>"
    sampled_ids = [t for t, m in zip(response, made.loss_mask, strict=True) if m]
    assert tokenizer.decode(sampled_ids) == f"well {CALL}<|end|>it is 3<|end|>"
    assert "add" in tokenizer.decode(prompt) and "Be good." in tokenizer.decode(prompt)


def test_nonsense_costs_nothing(world: World) -> None:
    endpoint = world("yes")
    server = endpoint.pool._server
    head = b"POST /sessions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with create_connection(server._bound.getsockname()) as gone:
        gone.sendall(head + b"Content-Length: 2\r\nAuthorization: x\r\n\r\n{}")
        until(lambda: server._active, "it waits for a session, which it must not get")
    until(lambda: not server._server.server_state.connections, "it has gone")
    work = endpoint.begin()
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
    with client(work) as agent, pytest.raises(openai.BadRequestError, match="n = 2") as no:
        agent.chat.completions.create(model="m", messages=[user("go")], n=2)
    assert no.value.param == "n"
    assert ask(work, user("go"))[0] == 200
    for none in ("much", None, True, 1e999):
        assert reward(work, none) == 400
    assert reward(work, 1.0, a="b") == 400
    assert reward(work, 2.0) == 200
    made = endpoint.trajectory()
    assert (made.turns, made.reward) == (1, 2.0)


def test_it_stops_while_agents_wait_for_work(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = world("yes")
    answers = list[Any]()
    url = f"{endpoint.url}/sessions"
    waiting = Thread(target=lambda: answers.append(send(url, {"wait_s": 60.0})))
    waiting.start()
    until(lambda: endpoint.pool._server._active, "the session is asked for")
    endpoint.close()
    waiting.join(WAIT_S)
    assert [(status, said["error"]["code"]) for status, said in answers] == [(503, "no_work")]
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_what_is_too_long_is_refused_and_the_reward_still_counts(world: World) -> None:
    endpoint = world("yes", max_context=64)
    work = endpoint.begin()
    assert ask(work, user("x" * 70))[0] == 400
    status, said = ask(work, user("go"))
    assert status == 200
    status, refused = ask(work, user("go"), said["choices"][0]["message"], user("x" * 70))
    assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
    assert "context length" in refused["error"]["message"], "which agents look for"
    assert "post the reward" in refused["error"]["message"]
    assert reward(work, 0.25) == 200
    trajectory = endpoint.trajectory()
    assert (trajectory.reward, trajectory.turns, trajectory.finish_reason) == (0.25, 1, "stop")
    work = endpoint.begin()
    endpoint.close_driver()
    asking = Thread(target=ask, args=(work, user("x" * 70)))
    asking.start()
    until(lambda: endpoint.pool.sessions.find(work["id"]).asking, "it asks")
    assert reward(work, 0.5) == 200  # before the refusal, so there is nothing that is rewarded
    until(lambda: endpoint.runner.poll(0.0) or not endpoint.runner.active, "the sample ends")
    assert "only request was refused: the prompt" in endpoint.runner.results()[1][0].reason
    asking.join()


def test_a_sample_that_is_given_up_or_taken_back_ends_its_session(world: World) -> None:
    endpoint = world("yes")
    work = endpoint.begin()
    assert send(work["url"], {"reason": "no disk"}, method="DELETE")[0] == 200
    assert endpoint.failed() == "its agent gave up: no disk"
    assert ask(work, user("go"))[0] == 410
    work = endpoint.begin()
    assert ask(work, user("go"))[0] == 200
    endpoint.drop("s", 1)
    status, refused = ask(work, user("go"), {"role": "assistant", "content": "yes"}, user("on"))
    assert (status, refused["error"]["code"]) == (410, "session_over")


def test_a_stop_string_ends_the_turn_and_stays_in_its_tokens(world: World, tokenizer: Any) -> None:
    endpoint = world("think. Observation: made up", "42")
    work = endpoint.begin()
    history: list[Any] = [user("go")]
    with client(work) as agent:
        first = agent.chat.completions.create(model="m", messages=history, stop=["Observation:"])
        assert first.choices[0].finish_reason == "stop"
        assert first.choices[0].message.content == "think. "
        history += [first.choices[0].message, {"role": "user", "content": "Observation: 42"}]
        second = agent.chat.completions.create(
            model="m", messages=history, stop=["Observation:"], stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in second if c.choices) == "42"
    assert reward(work, 1.0) == 200
    made = endpoint.trajectory()
    # The template ends the turn, as the model did not.
    response = tokenizer.decode(unpack_int32(made.response_ids))
    assert response == "think. Observation:<|end|><|user|>Observation: 42<|assistant|>42<|end|>"
    assert made.loss_mask.startswith(b"\1" * len("think. Observation:") + b"\0")
    assert sum(made.loss_mask) == len("think. Observation:42") + 1


def test_agents_are_told_an_address_that_they_reach_whatever_they_say(world: World) -> None:
    endpoint = world("yes", advertise="host.docker.internal")
    port = endpoint.pool._server._bound.getsockname()[1]
    here = f"http://127.0.0.1:{port}"
    told = f"http://host.docker.internal:{port}"
    assert endpoint.url == told
    endpoint.add(sample({"prompt": "go"}))
    forwarded = {"x-forwarded-host": "evil.example", "x-forwarded-proto": "https"}
    called = {"host": f"host.docker.internal:{port}", **forwarded}  # as a client there says
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
    with pytest.raises(UsageError, match="UMBRA_AGENT_KEY"):  # others can reach it
        bind("0.0.0.0:0", "")
    with closing(bind("0.0.0.0:0", "key")) as anywhere:
        assert url_of(anywhere).startswith("http://127.0.0.1:")


# -- a trajectory records the sampled tokens, whatever happens on the way -------------------------


def engine_of(model: Any, version: int) -> TorchEngine:
    options: Any = {"stop_ids": STOPS, "slots": 2, "max_context": 1024, "seed": 5}
    return TorchEngine(model, **options, version=version)


def test_each_line_has_the_tokens_and_logprobs_of_the_version_that_each_span_names(
    world: World, tiny_model_dir: Path
) -> None:
    """New weights come within turns and between; the agent edits and compacts its history."""
    first = load_model(tiny_model_dir, torch.device("cpu"), torch.float32)
    models = {0: first, **{version: other_weights(first, version) for version in (1, 2, 3, 4)}}
    engine = engine_of(load_model(tiny_model_dir, torch.device("cpu"), torch.float32), 0)
    due = [(3, 1), (11, 2), (12, 3), (40, 4)]  # (after so many tokens, version)

    def update(runner: RolloutRunner) -> None:
        if due and engine.decoded_tokens >= due[0][0]:
            _, version = due.pop(0)
            load(engine, models[version].named_parameters(), version, "recompute")

    endpoint = world(
        engine=engine, temperature=TEMPERATURE, branches=8, max_context=1024, between=update
    )
    work = endpoint.begin("talk")
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
    assert reward(work, 0.5) == 200
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


class Interruption:
    """Takes all samples back once the engine has decoded `cut` more tokens."""

    def __init__(self, engine: Engine, cut: int) -> None:
        self.begun, self.over = False, Event()
        self.returned: list[ReturnedSample] = []
        self._engine, self._until = engine, engine.decoded_tokens + cut

    def __call__(self, runner: RolloutRunner) -> None:
        if not self.begun and self._engine.decoded_tokens >= self._until:
            self.begun = True
            self.returned = runner.drain("next")
            self.over.set()


def converse(endpoint: AgentWorld, hint: str) -> bool:
    """An agent that says `hint` after each turn; whether it came to its end."""
    work = endpoint.lease()
    messages = [user(work["row"]["prompt"])]
    for turn in range(TURNS):
        status, said = ask(work, *messages)
        if status == 410:
            return False
        assert status == 200, said
        messages += [said["choices"][0]["message"], user(f"{hint} {turn}")]
    return reward(work, float(len(messages))) == 200


def play(world: World, model: Any, cuts: list[int], *hints: str) -> Trajectory:
    """The greedy trajectory of an agent that the next generator goes on with after each cut.

    At each attempt it says another of `hints`, the last from then on.
    """
    partial = None
    for attempt, cut in enumerate([*cuts, 10_000], start=1):
        engine = engine_of(model, attempt)
        interruption = Interruption(engine, cut)
        endpoint = world(engine=engine, temperature=0.0, max_context=1024, between=interruption)
        endpoint.add(sample({"prompt": "talk"}, attempt=attempt, trajectory=partial))
        hint = hints[min(attempt, len(hints)) - 1]
        done = False
        while not interruption.begun and not done:  # a sample that restarts has another session
            done = converse(endpoint, hint)
        if done:
            return endpoint.trajectory()
        assert interruption.over.wait(WAIT_S)
        endpoint.close()
        partial = interruption.returned[0].partial
    raise AssertionError("it does not end")


@pytest.mark.parametrize("cuts", [[9], [4, 8, 6]])
def test_a_sample_goes_on_token_for_token_on_another_generator(
    model: Any, world: World, cuts: list[int]
) -> None:
    whole = play(world, model, [], "go")
    pieces = play(world, model, cuts, "go")
    assert len(pieces.spans) == len(cuts) + 1
    for name in ("prompt_ids", "response_ids", "loss_mask", "reward", "turns"):
        assert getattr(pieces, name) == getattr(whole, name), name


def test_an_agent_that_does_not_do_the_same_again_begins_anew(model: Any, world: World) -> None:
    whole = play(world, model, [], "go")
    again = play(world, model, [9], "come", "go")
    assert [span.version for span in again.spans] == [2]
    assert (again.response_ids, again.reward) == (whole.response_ids, whole.reward)
