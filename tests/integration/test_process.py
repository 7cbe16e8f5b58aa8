"""Real child processes under the supervisor: they end when they should and leave nothing behind."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.commands import call, fork_server
from fakes.slowness import is_alive, limit, until

from umbra.deploy.prepare.stage import StageInterrupted, Stages
from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import UsageError
from umbra.services.process.child import (
    TUNABLES,
    ChildProcess,
    child_environ,
    python_argv,
    with_fast_copies,
)
from umbra.services.process.command import SignalCounter
from umbra.services.process.fork_server import ForkServer
from umbra.services.process.supervisor import Program, Supervisor

PROGRAMS = Path(__file__).parents[1] / "programs"
CHILD = (sys.executable, str(PROGRAMS / "child.py"))
DEADLINE_S = limit(20.0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


@pytest.fixture(params=["executed", "forked"])
def server(request: pytest.FixtureRequest) -> ForkServer | None:
    return fork_server() if request.param == "forked" else None


def start(
    folder: RunFolder, server: ForkServer | None, name: str = "child", **environ: str
) -> ChildProcess:
    """A `child.py` that is up."""
    process = ChildProcess(
        CHILD,
        stdout=folder.log(name),
        stderr=folder.log(name),
        environ={**os.environ, "CHILD_READY": "tcp://127.0.0.1:5", **environ},
        server=server,
    )
    until(process.ready, "the child's ready line")
    return process


def test_a_deaf_child_is_killed_with_its_children(
    folder: RunFolder, server: ForkServer | None, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    process = start(folder, server, CHILD_DEAF="1", CHILD_GRANDCHILD=str(pid_file))
    grandchild = int(pid_file.read_text())
    process.kill()
    until(lambda: process.poll() is not None, "the child's end")
    assert process.poll() == -signal.SIGKILL
    until(lambda: not is_alive(grandchild), "the grandchild's end")


@pytest.mark.parametrize("how", ["executed", "forked"])
def test_children_die_with_a_killed_supervisor(folder: RunFolder, how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "parent.py"), str(folder.log("child")), how],
        stdout=subprocess.PIPE,
        env={**os.environ, "CHILD_READY": "x", "CHILD_PARENT": "1"},
        text=True,
    )
    assert parent.stdout is not None
    readable, _, _ = select.select([parent.stdout], [], [], DEADLINE_S)
    assert readable, "the parent started no child"
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.wait(DEADLINE_S)
    parent.stdout.close()
    until(lambda: not is_alive(child), "the orphan's end")
    assert folder.log("child").read_text() == "draining\n"  # it had the time to end in order


def test_a_supervised_generator_is_restarted(
    folder: RunFolder, server: ForkServer | None, tmp_path: Path
) -> None:
    """1. A generator crashes. 2. It is started again. 3. All are drained; nobody is left."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    pids: dict[str, list[int]] = {}
    said: list[str] = []

    def spawn(program: Program) -> ChildProcess:
        again = program.name in pids
        elastic = {"CHILD_EXIT_FIFO": str(fifo)} if program.elastic and not again else {}
        process = start(folder, server, program.name, **elastic)
        pids.setdefault(program.name, []).append(process.pid)
        return process

    supervisor = Supervisor(spawn, goal="trainer", report=said.append)
    supervisor.start(Program("buffer", CHILD, wave=2))
    supervisor.start(Program("trainer", CHILD, wave=0))
    supervisor.start(Program("generator-0", CHILD, wave=0, elastic=True))
    fifo.write_text("9")
    until(lambda: supervisor.poll() and len(pids["generator-0"]) == 2, "the restart")
    assert said == ["generator-0 ended (exit code 9): restart 1 in 0.5 s"]
    supervisor.drain()
    until(lambda: not supervisor.poll(), "the drain")
    assert said[1:] == []
    assert not any(is_alive(pid) for each in pids.values() for pid in each)
    assert all(usage.cpu_s > 0 for usage in supervisor.usage().values())


DRAW = """
import random, torch
line = open("/proc/self/cmdline").read()
print([word for word in line.split("\\0") if word])
print(random.random(), torch.rand(1).item())
raise ValueError("why")
"""


def test_forks_differ_as_programs_do(folder: RunFolder) -> None:
    """Their command lines, sessions and random numbers; one that ends by an error says which."""
    assert fork_server().ready()
    (folder.path / "draw.py").write_text(DRAW)
    drawn = set[str]()
    for name in ("a", "b"):
        argv = (sys.executable, str(folder.path / "draw.py"), name)
        log = folder.log(name)
        child = ChildProcess(argv, stdout=log, stderr=log, server=fork_server())
        assert child._popen is None, "it was not forked"
        assert os.getsid(child.pid) == child.pid
        until(lambda child=child: child.poll() is not None, "its end")
        assert child.returncode == 1
        line, numbers, *_, last = log.read_text().splitlines()
        assert line == str(list(argv))
        assert last == "ValueError: why"
        drawn.update(numbers.split())
    assert len(drawn) == 4


def test_where_the_server_has_ended_programs_are_executed(folder: RunFolder) -> None:
    server = ForkServer(child_environ())
    server._end.shutdown(socket.SHUT_WR)
    process = start(folder, server)
    assert process._popen is not None
    process.terminate()
    until(lambda: process.poll() is not None, "its end")
    server.close()


def test_a_failed_stage_says_why_and_a_signal_ends_one(folder: RunFolder) -> None:
    with SignalCounter() as interrupts:
        stages = Stages(folder, interrupts=interrupts)
        with pytest.raises(UsageError, match=r"nothing\.toml"):
            stages.run("show", "check", "--show", "nothing.toml")
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StageInterrupted):
            stages.run("version", "--version")
    assert interrupts.exit_code == 130


def test_children_do_not_see_what_is_resolved_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBRA_RUN__STEPS", "7")
    monkeypatch.setenv("UMBRA_BROKER", "tcp://h:1")
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.delenv(TUNABLES, raising=False)
    environ = child_environ([Path("/here"), Path("/there")])
    assert environ[TUNABLES].startswith(COPIES)
    assert "UMBRA_RUN__STEPS" not in environ
    assert environ["UMBRA_BROKER"] == "tcp://h:1"
    assert environ["PYTHONPATH"] == "before"
    assert environ["UMBRA_SEARCH"] == "/here:/there"


def test_a_file_beside_the_run_file_shadows_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "msgspec", "reward"):
        (tmp_path / f"{name}.py").write_text("score = 1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    program = "import json, msgspec, umbra, reward; json.loads; print(reward.score)"
    done = call([sys.executable, "-P", "-c", program], env=child_environ([tmp_path]))
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert python_argv("umbra")[1:] == ("-P", "-m", "umbra")


COPIES = "glibc.cpu.x86_non_temporal_threshold"


def test_children_copy_past_the_cache_unless_told_otherwise() -> None:
    check = "glibc.malloc.check=1"
    for given, expected in (
        ({}, f"{COPIES}=0x100000"),
        ({TUNABLES: check}, f"{check}:{COPIES}=0x100000"),
        ({TUNABLES: f"{COPIES}=0x5000000"}, f"{COPIES}=0x5000000"),
    ):
        assert with_fast_copies(given)[TUNABLES] == expected
