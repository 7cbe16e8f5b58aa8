"""A thread that fails ends its process with a sentence, whichever service it belongs to."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from fakes.commands import call
from fakes.hub_bench import WAIT_S, Bench, publish
from starlette.responses import Response

from umbra.proto import errors
from umbra.proto.errors import UmbraError
from umbra.proto.net.io_thread import IoThread
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.worker_pool import WorkerPool
from umbra.services.http import HttpServer, listen
from umbra.services.process import loop_thread
from umbra.services.process.command import service_command
from umbra.services.process.loop_thread import LoopThread
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.daemon import Daemon
from umbra.services.weights.receiver import Receiver

Ends = Callable[[], str]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Wait for the sentence with which the process would have ended."""
    found: queue.SimpleQueue[UmbraError] = queue.SimpleQueue()
    monkeypatch.setattr(errors, "end_process", found.put)
    return lambda: str(found.get(timeout=WAIT_S))


def breaks(*_args: Any, **_kwargs: Any) -> Any:
    raise KeyError(7)


PROGRAM = """
from threading import Event
from umbra.proto.errors import RejectedError, service_thread
def main():
    raise {}
service_thread(main, "io").start()
Event().wait()
"""


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("SystemExit()", 6, "the thread io failed: SystemExit"),
        ("RejectedError('no such run')", 4, "no such run"),
    ],
)
def test_it_ends_with_sentence_and_code(raised: str, code: int, said: str) -> None:
    done = call([sys.executable, "-c", PROGRAM.format(raised)])
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == f"umbra: error: {said}"
    assert not done.stdout


def test_the_links_thread(ends: Ends) -> None:
    link = IoThread("me", "one")
    link.run(breaks)
    assert ends() == "the thread umbra-link failed: KeyError: 7"
    link._thread.join()
    link._shut()


def test_what_is_called_in_an_event_loop(ends: Ends) -> None:
    with closing(LoopThread("environments")) as loop:
        loop.call(breaks)
        assert ends() == "the thread environments failed: KeyError: 7"


def test_an_event_loop_that_is_held_up_holds_up_no_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "CLOSE_S", 0.01)
    loop, goes_on = LoopThread("environments"), threading.Event()
    loop.call(goes_on.wait, WAIT_S)
    loop.close()
    assert not loop.closed
    goes_on.set()
    loop._thread.join(WAIT_S)
    loop.close()
    assert loop.closed


def test_an_http_server(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = listen("127.0.0.1:0", "--web")
    server = HttpServer(Response(), bound, requests=1)
    monkeypatch.setattr(server._server, "on_tick", breaks)
    with bound, closing(LoopThread("http")) as loop:
        loop.wait(server.start(), WAIT_S)
        assert ends() == "the HTTP server failed: KeyError: 7"


def test_the_keeper_of_environment_processes(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        workers = WorkerPool(EnvironmentConfig(), deliver=breaks)
        monkeypatch.setattr(workers, "start", breaks)
        workers._spawn(workers._grow())
        await asyncio.sleep(0)
        await workers.close()

    asyncio.run(main())
    assert ends() == "the keeper of environment processes failed: KeyError: 7"


@pytest.mark.parametrize("error", [KeyError(7), RuntimeError("CUDA error: unknown"), SystemExit()])
def test_whatever_ends_a_receivers_thread_is_its_owners_failure(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    bench.start()
    publisher, receiver = bench.publisher(), bench.receiver("gen-0")
    monkeypatch.setattr(receiver, "_begin", Mock(side_effect=error))
    publish(publisher, 0)
    receiver._thread.join(WAIT_S)
    for ask in (receiver.poll, receiver.check):
        with pytest.raises(UmbraError, match="the receiver of weights failed: ") as caught:
            ask()
        assert type(error).__name__ in str(caught.value)
        assert caught.value.exit_code == 6


def test_a_daemon_ends_when_its_receiver_fails(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.start()
    publisher = bench.publisher()
    metrics = MetricsFile(None, "relay-0")
    relay = Daemon("relay-0", bench.config(), metrics, upstream=bench.endpoint, host="node-0")
    monkeypatch.setattr(Receiver, "_begin", breaks)
    publish(publisher, 0)
    with pytest.raises(UmbraError, match="the receiver of weights failed: KeyError: 7"):
        relay.run("relay-0", threading.Event(), WAIT_S)


def test_a_service_ends_with_a_sentence_unless_a_package_is_missing() -> None:
    """The command names that."""
    result = CliRunner().invoke(service_command("trainer", breaks), ["--broker", "tcp://h:1"])
    assert isinstance(result.exception, UmbraError)
    assert str(result.exception) == "trainer failed: KeyError: 7"

    missing = Mock(side_effect=ModuleNotFoundError("No module named 'torch'", name="torch"))
    result = CliRunner().invoke(service_command("trainer", missing), ["--broker", "tcp://h:1"])
    assert isinstance(result.exception, ModuleNotFoundError)
