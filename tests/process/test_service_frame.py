"""The frame of every service: flags, readiness, logging, signals, and death with the parent."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
from fakes.commands import call
from fakes.slowness import limit

from umbra.proto.errors import UsageError
from umbra.services.process.command import (
    LineFormatter,
    ServiceContext,
    SignalCounter,
    service_command,
)

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
            signals.wait(limit(20.0))
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
