"""The frame of every service: flags, readiness, logging, signals; a thread that fails ends it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from fakes.commands import call
from fakes.hub_bench import WAIT_S, Bench, publish
from starlette.responses import Response

from umbra.proto import errors
from umbra.proto.errors import UmbraError, UsageError
from umbra.proto.net.io_thread import IoThread
from umbra.services.config import EnvironmentConfig
from umbra.services.environments.worker_pool import WorkerPool
from umbra.services.http import HttpServer, listen
from umbra.services.process import loop_thread
from umbra.services.process.command import (
    LineFormatter,
    ServiceContext,
    SignalCounter,
    service_command,
)
from umbra.services.process.loop_thread import LoopThread
from umbra.services.process.metrics import MetricsFile
from umbra.services.weight_hub.daemon import Daemon
from umbra.services.weights.receiver import Receiver

BROKER = ("--broker", "tcp://127.0.0.1:1")


def run_service(*flags: str) -> ServiceContext:
    """The context that a trainer's `run` gets under `flags`."""
    seen: list[ServiceContext] = []
    command = service_command("trainer", lambda context: seen.append(context) or 0)
    with pytest.raises(SystemExit) as end:
        command.main([*BROKER, *flags], standalone_mode=False)
    assert end.value.code == 0
    return seen[0]


def test_set_overrides_the_file_and_a_bad_flag_is_the_users_mistake(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nlearning_rate = 1e-3\nwarmup_steps = 1\nclip_low = 0.3\n")
    context = run_service("--config", str(file), "--set", "trainer.warmup_steps=2")
    trainer = context.config.trainer
    assert (trainer.learning_rate, trainer.warmup_steps, trainer.pieces.clip_low) == (1e-3, 2, 0.3)
    assert context.config.run.broker == BROKER[1]
    with pytest.raises(UsageError, match=r"trainer\.learning_rate"):
        run_service("--set", "trainer.learning_rate=fast")


def test_readiness_is_one_line_on_the_given_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv("UMBRA_READY_FD", str(writing))
    run_service().ready({"broker": "tcp://127.0.0.1:1"})
    with os.fdopen(reading) as pipe:
        assert json.loads(pipe.readline()) == {"broker": "tcp://127.0.0.1:1"}
        assert pipe.read() == ""  # closed on the writing side


def test_logs_are_one_line_or_one_object() -> None:
    record = logging.LogRecord("umbra.x", logging.WARNING, "f.py", 1, "lost %s", ("s-1",), None)
    assert LineFormatter("buffer", as_json=False).format(record).endswith("buffer warning lost s-1")
    row = json.loads(LineFormatter("buffer", as_json=True).format(record))
    assert (row["level"], row["service"], row["message"]) == ("warning", "buffer", "lost s-1")


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_drains_like_a_signal_to_end(ignored: bool) -> None:
    """SIGHUP comes several times then; only the first counts, and none that nohup ignores."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with SignalCounter() as signals:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
            if ignored:
                assert signals.count == 0
                return
            signals.wait(WAIT_S)
            assert (signals.count, signals.exit_code) == (1, 128 + signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.count == 2
    finally:
        signal.signal(signal.SIGHUP, before)


SIGNALS = """
import os, signal, sys, threading
from umbra.services.process.command import stop_on_signals
before, stopping = signal.getsignal(signal.SIGINT), threading.Event()
if "told" in sys.argv:
    stopping.set()
with stop_on_signals(stopping):
    for _ in range(int(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGINT)
    stopping.wait()
assert signal.getsignal(signal.SIGINT) is before
"""


@pytest.mark.parametrize(
    ("words", "supervised", "code"),
    [
        (("1",), False, 0),  # sets the flag
        (("2",), False, -signal.SIGINT),
        (("2",), True, 0),  # its supervisor kills when it means to
        (("1", "told"), False, 0),  # a stop for another reason is no first signal
        (("2", "told"), False, -signal.SIGINT),
    ],
)
def test_the_second_signal_ends_a_process_that_nobody_supervises(
    words: tuple[str, ...], supervised: bool, code: int
) -> None:
    environ = {"UMBRA_PARENT_PID": str(os.getpid())} if supervised else {}
    assert call([sys.executable, "-c", SIGNALS, *words], env=environ).returncode == code


def test_a_service_may_have_as_many_connections_as_the_machine_allows() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
from umbra.services.process.command import allow_connections
allow_connections()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert call([sys.executable, "-c", code], check=True).stdout.split() == ["512", "512"]


# -- threads --------------------------------------------------------------------------------------

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
    """The command names that. A file that is lost under way is no mistake of the user's."""
    for error, told in ((KeyError(7), "KeyError: 7"), (FileNotFoundError(2, "no file", "x"), "x'")):
        command = service_command("trainer", Mock(side_effect=error))
        result = CliRunner().invoke(command, BROKER)
        assert isinstance(result.exception, UmbraError) and result.exception.exit_code == 6
        assert str(result.exception).startswith(f"trainer failed: {type(error).__name__}: ")
        assert str(result.exception).endswith(told) and "Traceback" in result.stderr
    missing = Mock(side_effect=ModuleNotFoundError("No module named 'torch'", name="torch"))
    result = CliRunner().invoke(service_command("trainer", missing), BROKER)
    assert isinstance(result.exception, ModuleNotFoundError)
