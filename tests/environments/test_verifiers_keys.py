"""Keys of sessions, which `verifiers` reads from environment variables, whenever it likes."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from umbra.services.environments.protocol import StepResult
from umbra.services.environments.verifiers import TASK_DATA, verifiers_program

ROW = {"prompt": "p", TASK_DATA: {}}


class Client:
    def __init__(self, **options: Any) -> None:
        self.key_variable: str = options["api_key_var"]
        self.url: str = options["base_url"]

    async def ask(self) -> float:
        """The number of the endpoint that takes the key, once others were heard."""
        for _ in range(3):
            await asyncio.sleep(0)
        assert self.url.endswith(os.environ[self.key_variable]), "the key of another generator"
        return float(self.url[-1])


class Task:
    def __init__(self, *_: Any) -> None:
        """Nothing of it matters."""

    @classmethod
    def data_type(cls) -> type[Task]:
        return cls

    @classmethod
    def model_validate(cls, _data: Any) -> Task:
        return cls()

    @classmethod
    def task_type(cls) -> type[Task]:
        return cls


class OneOfTheirs:
    def __init__(self) -> None:
        self.config = SimpleNamespace(taskset=SimpleNamespace(task=None))
        self.taskset = Task()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        yield

    async def run_episode(self, _task: Any, context: Any) -> Any:
        trace = SimpleNamespace(
            agent=None, errors=[], rewards={}, metrics={}, is_truncated=False,
            reward=await context.client.ask(),
        )  # fmt: skip
        return SimpleNamespace(traces=[trace], errors=[], ok=True)


LIBRARY = {
    "verifiers.v1": SimpleNamespace(
        env_config_type=lambda *_: SimpleNamespace(model_validate=lambda tree: tree),
        load_environment=lambda config: OneOfTheirs(),
        EvalClientConfig=Client,
        ModelContext=lambda model, client: SimpleNamespace(client=client),
    ),
}


def test_samples_of_several_generators_in_one_process_keep_their_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(importlib, "import_module", LIBRARY.__getitem__)
    play: Callable[..., Awaitable[StepResult]] = verifiers_program("theirs", {}, "theirs")

    async def together() -> list[StepResult]:
        endpoints = [{"base_url": f"http://g/key-{n}", "api_key": f"key-{n}"} for n in (1, 2)]
        found = await asyncio.gather(*(play(ROW, endpoint) for endpoint in endpoints))
        for keeper in asyncio.all_tasks() - {asyncio.current_task()}:
            keeper.cancel()
        return found

    assert [result.reward for result in asyncio.run(together())] == [1.0, 2.0]
