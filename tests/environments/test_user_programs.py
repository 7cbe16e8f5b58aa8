"""Programs of users in one process: their event loops and their arguments."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from umbra.services.environments import agent_program
from umbra.services.environments.agent_program import AgentProgram, Conversation
from umbra.services.environments.protocol import Message, Row, SampleError, StepResult
from umbra.services.environments.worker import EnvironmentHost


async def later(value: float) -> float:
    await asyncio.sleep(0)
    return value


class OwnLoops:
    """Methods that begin a loop, and use the one that there is, as `run_sync` of libraries does."""

    def __init__(self) -> None:
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.closed = False

    def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": str(self.run_sync(row["number"]))}]

    def step(self, response: str) -> StepResult:
        if response == "close":
            self.loops[-1].close()
            return StepResult(done=False, messages=[{"role": "user", "content": "closed"}])
        value = asyncio.run(later(self.run_sync(float(response))))
        if value < 0:
            raise ValueError("as asked")
        return StepResult(reward=value)

    def close(self) -> None:
        self.closed = asyncio.run(later(1.0)) == 1.0

    def run_sync(self, value: float) -> float:
        self.loops.append(asyncio.get_event_loop())
        return self.loops[-1].run_until_complete(later(value))


def test_plain_methods_may_run_loops_of_their_own_and_use_that_of_their_thread() -> None:
    made = OwnLoops()

    async def play() -> None:
        ours, task = asyncio.get_running_loop(), asyncio.current_task()
        host = EnvironmentHost(lambda: made, "mine")
        opened = await host.play("a", {"number": 3}, [])
        assert getattr(opened, "messages", None) == [{"role": "user", "content": "3"}]
        for said in ("0.5", "close", "0.25"):
            answer = await host.play("a", {"number": 3}, [said])
            assert said == "close" or answer == StepResult(reward=float(said))
            assert asyncio.get_event_loop_policy().get_event_loop() is ours
        first, *others = made.loops
        assert first is not ours and others[:1] == [first]  # as in a script, all use one
        assert others[1] is not first  # which may be closed
        with pytest.raises(SampleError, match="as asked"):
            await host.play("b", {"number": 1}, ["-1"])
        await host.close()
        assert (asyncio.get_running_loop(), asyncio.current_task()) == (ours, task)
        assert await asyncio.wait_for(later(2.0), None) == 2.0

    asyncio.run(play())
    assert made.closed


class Together:
    """Plain methods that lend their process to others: their loop stays where it is."""

    concurrent = True

    def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": str(row["prompt"])}]

    def step(self, response: str) -> asyncio.Task[StepResult]:
        return asyncio.get_running_loop().create_task(self.answer(response))

    async def answer(self, response: str) -> StepResult:
        """Return the result that `step` promises."""
        return StepResult(reward=await later(float(response)))


def test_methods_that_lend_their_process_see_its_loop() -> None:
    host = EnvironmentHost(Together, "together")  # pyright: ignore[reportArgumentType]
    assert asyncio.run(host.play("a", {"prompt": "x"}, ["1"])) == StepResult(reward=1.0)


# -- the arguments that an agent's function is called with ----------------------------------------

ENDPOINT = {"base_url": "http://127.0.0.1:1/v1", "api_key": "k"}


def alone(row: dict[str, Any], *, worth: float = 1.0) -> float:
    return worth * (os.environ["OPENAI_BASE_URL"] == ENDPOINT["base_url"])


async def waits(row: dict[str, Any]) -> float:
    return 1.0


def test_a_plain_function_may_take_the_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    program = AgentProgram(alone, "agent", worth=1)
    program.reset({})
    assert program.step(json.dumps(ENDPOINT)).reward == 1.0  # type: ignore[union-attr]
    with pytest.raises(TypeError):  # several play in a process, which has one environment
        AgentProgram(waits, "agent")


# -- a conversation whose loop is ours ------------------------------------------------------------

SAID = {"role": "assistant", "content": "hi"}
TURN = 200, {"choices": [{"message": SAID, "finish_reason": "stop"}]}
CUT = 200, {"choices": [{"message": SAID, "finish_reason": "length"}]}
NO_TURN = 409, {"error": {"code": "turn_limit_reached", "message": "no more"}}
NO_ROOM = 409, {"error": {"code": "context_length_exceeded", "message": "too long"}}
BROKEN = 500, {"error": {"code": "broken", "message": "it broke"}}


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        ([TURN, CUT], "length"),
        ([TURN, NO_TURN], "turns"),
        ([TURN, NO_ROOM], "length"),
        ([NO_TURN], "the model gave no turn: no more"),  # there is nothing to reward
        ([TURN, BROKEN], "the model gave no turn: it broke"),
        ([TURN, OSError("refused")], "the model's endpoint failed: refused"),
    ],
)
def test_a_conversation_ends_at_a_limit_or_fails(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], end: str
) -> None:
    given, sent = iter(answers), list[Any]()

    async def request(url: str, key: str, body: Any) -> Any:
        sent.append((url, key, list(body["messages"])))
        if isinstance(answer := next(given), OSError):
            raise answer
        return answer

    async def hold() -> str:
        try:
            while await conversation.ask():
                conversation.messages.append({"role": "user", "content": "go on"})
        except SampleError as error:
            return str(error)
        assert conversation.messages[1] == SAID
        return conversation.reason

    monkeypatch.setattr(agent_program, "request", request)
    conversation = Conversation(ENDPOINT, {"prompt": "add"}, " up", [])
    assert asyncio.run(hold()) == end and len(sent) == len(answers)
    prompt = {"role": "user", "content": "add up"}
    assert sent[0] == (f"{ENDPOINT['base_url']}/chat/completions", ENDPOINT["api_key"], [prompt])
