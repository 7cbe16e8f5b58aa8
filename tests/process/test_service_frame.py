"""What frames every service: flags, readiness, logging, signals, and death with the parent."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from fakes.slowness import limit

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.process.command import ServiceContext, service_command
from umbra.services.process.logs import LineFormatter
from umbra.services.process.metrics import MetricsFile
from umbra.services.process.signals import SignalCounter, stop_on_signals

WAIT_S = limit(20.0)


def run_service(*flags: str, env: dict[str, str] | None = None) -> ServiceContext:
    """The context that a trainer's `run` gets under `flags`."""
    seen: list[ServiceContext] = []

    def run(context: ServiceContext) -> int:
        seen.append(context)
        return 0

    result = CliRunner().invoke(service_command("trainer", run), flags, env=env)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen[0]


def test_there_is_a_documented_flag_for_every_field() -> None:
    command = service_command("trainer", lambda _context: 0)
    options = {p.name: p for p in command.params if isinstance(p, click.Option)}
    for field in TrainerConfig.__struct_fields__:
        assert options[field].help, field


def test_flags_override_set_which_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nlearning_rate = 1e-3\nwarmup_steps = 1\nclip_low = 0.3\n")
    context = run_service(
        *("--config", str(file), "--set", "trainer.warmup_steps=2", "--learning-rate", "0.5"),
        *("--broker", "tcp://127.0.0.1:1"),
    )
    trainer = context.config.trainer
    assert (trainer.learning_rate, trainer.warmup_steps, trainer.clip_low) == (0.5, 2, 0.3)


def test_the_environment_overrides_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBRA_TRAINER__CLIP_LOW", "0.1")
    context = run_service("--broker", "tcp://10.0.0.1:5")
    assert context.config.trainer.clip_low == 0.1
    assert context.broker == "tcp://10.0.0.1:5"


def test_a_bad_flag_is_the_users_mistake() -> None:
    with pytest.raises(UsageError, match=r"trainer\.learning_rate"):
        run_service("--learning-rate", "fast")


def test_readiness_is_one_line_on_the_given_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv("UMBRA_READY_FD", str(writing))
    run_service("--broker", "tcp://127.0.0.1:1").ready({"broker": "tcp://127.0.0.1:1"})
    with os.fdopen(reading) as pipe:
        assert json.loads(pipe.readline()) == {"broker": "tcp://127.0.0.1:1"}
        assert pipe.read() == ""  # closed on the writing side


def test_metrics_of_several_services_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    one, two = MetricsFile(path, "one"), MetricsFile(path, "two")
    one.write("step", step=1)
    with two.span("decode"):
        one.write("step", step=2)
    one.close()
    two.close()
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["service"], row["kind"]) for row in rows] == [
        ("one", "step"),
        ("one", "step"),
        ("two", "span"),
    ]
    assert rows[2]["start"] <= rows[2]["end"]


def test_logs_are_one_line_or_one_object() -> None:
    record = logging.LogRecord("umbra.x", logging.WARNING, "f.py", 1, "lost %s", ("s-1",), None)
    assert LineFormatter("buffer", as_json=False).format(record).endswith("buffer warning lost s-1")
    row = json.loads(LineFormatter("buffer", as_json=True).format(record))
    assert (row["level"], row["service"], row["message"]) == ("warning", "buffer", "lost s-1")


def test_the_first_signal_sets_the_flag_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stopping = threading.Event()
    with stop_on_signals(stopping):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.wait(WAIT_S)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_terminal_drains_like_a_signal_to_end() -> None:
    """SIGHUP comes several times then; the second one must not end at once."""
    with SignalCounter() as signals:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        signals.wait(WAIT_S)
        assert (signals.count, signals.exit_code) == (1, 128 + signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.count == 2


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalCounter() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.count == 0
    finally:
        signal.signal(signal.SIGHUP, before)


TWO_SIGNALS = """
import os, signal, threading
from umbra.services.process.signals import stop_on_signals
with stop_on_signals(threading.Event()):
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_the_second_signal_ends_the_process_by_that_signal() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], check=False, timeout=WAIT_S)
    assert done.returncode == -signal.SIGINT


def test_a_supervised_process_drains_however_often_it_is_told() -> None:
    environ = {**os.environ, "UMBRA_PARENT_PID": str(os.getpid())}
    done = subprocess.run(
        [sys.executable, "-c", TWO_SIGNALS], check=False, timeout=WAIT_S, env=environ
    )
    assert done.returncode == 0


def test_a_stop_for_another_reason_is_no_first_signal() -> None:
    """Told to stop by something else, it drains at the first signal, and ends at the next."""
    told = TWO_SIGNALS.replace("with ", "stopping = threading.Event()\nstopping.set()\nwith ")
    told = told.replace("signals(threading.Event())", "signals(stopping)")
    once = told.replace("    os.kill(os.getpid(), signal.SIGINT)\n", "", 1)
    for program, code in ((once, 0), (told, -signal.SIGINT)):
        done = subprocess.run([sys.executable, "-c", program], check=False, timeout=WAIT_S)
        assert done.returncode == code


PARENT = """
import os, subprocess, sys
env = dict(os.environ, UMBRA_PARENT_PID=str(os.getpid()))
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""
CHILD = """
import signal, sys, threading
from umbra.services.process.parent import die_with_parent
from umbra.services.process.signals import stop_on_signals
stopping = threading.Event()
with stop_on_signals(stopping):
    die_with_parent()
    print("up", flush=True)
    stopping.wait()
"""


@pytest.mark.fault
def test_a_child_gets_sigterm_when_its_parent_is_killed() -> None:
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, CHILD], check=False, timeout=WAIT_S, stdout=subprocess.PIPE
    )
    pid = int(parent.stdout)
    assert parent.returncode == -signal.SIGKILL
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return  # gone already
    ended, _, _ = select.select([descriptor], [], [], WAIT_S)
    os.close(descriptor)
    assert ended, f"child {pid} outlived its parent"


def test_a_service_may_have_as_many_connections_as_the_machine_allows() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 512))
from umbra.services.process.command import allow_connections
allow_connections()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout.split() == ["512", "512"]
