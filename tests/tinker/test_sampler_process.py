"""The requests that a sampler gets, and the journal that keeps requests."""

import asyncio
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from umbra.proto.errors import UsageError
from umbra.proto.records import Sampling
from umbra.services.config import RunConfig
from umbra.services.process.pipe import AsyncPipe
from umbra.services.tinker.journal import FutureAnswer, FuturesJournal
from umbra.services.tinker.sampler import _LiveJob
from umbra.services.tinker.sampler_process import (
    TRIES,
    SampleJob,
    SampleReport,
    SamplerProcess,
    SamplerStart,
    device_beside,
)
from umbra.services.tinker.wire import Weights, write_samples

ANSWER = FutureAnswer(b"{}")


def job(name: str, version: str = "v1", count: int = 1) -> SampleJob:
    return SampleJob(
        id=name,
        weights=Weights(4, version),
        prompt=[1],
        count=count,
        sampling=Sampling(),
        max_tokens=8,
        stop_tokens=None,
    )


class Asked:
    """A process of which only the pipe is there."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[tuple[str, FutureAnswer]] = asyncio.Queue()
        loop: Any = None
        self.process = SamplerProcess(
            RunConfig(), 1, loop, lambda *answer: self.answers.put_nowait(answer)
        )
        self._pipes: list[AsyncPipe[Any]] = []

    async def sampler(self, *wanted: str) -> AsyncPipe[Any]:
        """Let the next sampler join, which gets these requests; its end of the pipe."""
        ours, theirs = socket.socketpair()
        pipe: AsyncPipe[Any] = AsyncPipe(theirs, SamplerStart | SampleJob)
        self._pipes.append(pipe)
        self.process._join(ours, SamplerStart(b"", 0))
        assert isinstance(await pipe.receive(), SamplerStart)
        assert [await pipe.receive() for _ in wanted] == [job(name) for name in wanted]
        return pipe

    async def end(self) -> None:
        """End all samplers; nothing more may have been answered."""
        for pipe in self._pipes:
            pipe.close()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        assert self.answers.empty()


def test_the_next_sampler_gets_the_requests_without_an_answer() -> None:
    async def play() -> None:
        asked = Asked()
        for name in "ab":
            asked.process.submit(job(name))
        first = await asked.sampler("a", "b")
        first.send(SampleReport("b", ANSWER))
        assert await asked.answers.get() == ("b", ANSWER)
        asked.process.submit(job("c"))
        second = await asked.sampler("a", "c")
        for pipe in (second, first):  # which is late
            pipe.send(SampleReport("a", ANSWER))
        second.send(SampleReport("c", ANSWER))
        assert {(await asked.answers.get())[0] for _ in "ac"} == {"a", "c"}
        await asked.end()

    asyncio.run(play())


def test_a_request_with_which_samplers_end_fails() -> None:
    async def play() -> None:
        asked = Asked()
        asked.process.submit(job("bad"))
        for _ in range(TRIES):
            (await asked.sampler("bad")).close()
        await asked.sampler()
        name, answer = asked.answers.get_nowait()
        assert name == "bad" and answer.failed and b"3 samplers ended" in answer.body
        await asked.end()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("asked", "gpus", "wanted"),
    [("auto", 0, "auto"), ("cuda", 1, "cuda"), ("cpu", 4, "cpu"), ("auto", 3, "cuda:1")],
)
def test_the_sampler_leaves_the_trainer_its_gpu(asked: str, gpus: int, wanted: str) -> None:
    assert device_beside(asked, gpus) == wanted


def test_samples_are_told_in_the_order_of_their_start() -> None:
    """That of their ends would put short ones first."""
    first, second = ([1, 2], [-0.5, -0.5], False), ([3], [-0.25], True)
    live = _LiveJob(job("a", count=2), samples={"a/1": second, "a/0": first})
    assert live.answer().body == write_samples([first, second])


def test_a_journal_of_another_schema_is_refused(tmp_path: Path) -> None:
    for _ in range(2):  # the second finds the first one's schema
        FuturesJournal(tmp_path / "journal").close()
    with closing(sqlite3.connect(tmp_path / "journal")) as file:
        file.execute("PRAGMA user_version = 1")
    with pytest.raises(UsageError, match="has schema 1, not 3: name another --dir"):
        FuturesJournal(tmp_path / "journal")
