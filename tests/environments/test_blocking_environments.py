"""Plain methods of users run as in a script: they may begin an event loop of their own."""

from __future__ import annotations

import asyncio

import pytest

from umbra.services.environments.protocol import Message, Row, SampleError, StepResult
from umbra.services.environments.worker import EnvironmentHost


async def later(value: float) -> float:
    await asyncio.sleep(0)
    return value


class OwnLoop:
    """Every method begins a loop, as `run_sync` of many libraries does."""

    def __init__(self) -> None:
        self.closed = False

    def reset(self, row: Row) -> list[Message]:
        prompt = asyncio.run(later(float(row["number"])))
        return [{"role": "user", "content": str(prompt)}]

    def step(self, response: str) -> StepResult:
        if response == "raise":
            asyncio.run(later(0.0))
            raise ValueError("as asked")
        return StepResult(reward=asyncio.run(later(float(response))))

    def close(self) -> None:
        self.closed = asyncio.run(later(1.0)) == 1.0


def test_plain_methods_may_run_loops_of_their_own() -> None:
    made: list[OwnLoop] = []

    def make() -> OwnLoop:
        made.append(OwnLoop())
        return made[-1]

    async def play() -> None:
        host = EnvironmentHost(make, "mine")
        ours, task = asyncio.get_running_loop(), asyncio.current_task()
        opened = await host.play("a", {"number": 3}, [])
        assert getattr(opened, "messages", None) == [{"role": "user", "content": "3.0"}]
        assert await host.play("a", {"number": 3}, ["0.5"]) == StepResult(reward=0.5)
        with pytest.raises(SampleError, match="as asked"):
            await host.play("b", {"number": 1}, ["raise"])
        await host.close()
        assert (asyncio.get_running_loop(), asyncio.current_task()) == (ours, task)
        assert await asyncio.wait_for(later(2.0), None) == 2.0

    asyncio.run(play())
    assert all(one.closed for one in made)


class LibraryLoop:
    """Every method uses the loop that there is, as `run_sync` of openai-agents and others does."""

    def __init__(self) -> None:
        self.loops: list[asyncio.AbstractEventLoop] = []

    def reset(self, row: Row) -> list[Message]:
        return [{"role": "user", "content": str(self.run_sync(row["number"]))}]

    def step(self, response: str) -> StepResult:
        if response == "close":
            self.loops[-1].close()
            return StepResult(done=False, messages=[{"role": "user", "content": "closed"}])
        return StepResult(reward=asyncio.run(later(self.run_sync(float(response)))))

    def run_sync(self, value: float) -> float:
        self.loops.append(asyncio.get_event_loop())
        return self.loops[-1].run_until_complete(later(value))


def test_plain_methods_may_use_the_loop_of_their_thread() -> None:
    made = LibraryLoop()

    async def play() -> None:
        ours = asyncio.get_running_loop()
        host = EnvironmentHost(lambda: made, "mine")
        for said in ("0.5", "close", "0.25"):
            answer = await host.play("a", {"number": 3}, [said])
            assert said == "close" or answer == StepResult(reward=float(said))
            assert asyncio.get_event_loop_policy().get_event_loop() is ours
        first, *others = made.loops
        assert first is not ours and others[:1] == [first]  # as in a script, all use one
        assert others[1] is not first  # which may be closed

    asyncio.run(play())


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
