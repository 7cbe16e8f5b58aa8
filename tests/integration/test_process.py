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
from umbra.services.process.child import TUNABLES, ChildProcess, child_environ, python_argv
from umbra.services.process.command import SignalCounter
from umbra.services.process.fork_server import ForkServer

CHILD = (sys.executable, str(Path(__file__).parents[1] / "programs" / "child.py"))
# Starts a child, prints its pid once it is up, and waits.
PARENT = """
import sys, time
from pathlib import Path
from umbra.services.process import fork_server
from umbra.services.process.child import ChildProcess, child_environ
log, how, *argv = sys.argv[1:]
fork_server.MODULES = ("json",)
server = fork_server.ForkServer(child_environ()) if how == "forked" else None
child = ChildProcess(argv, stdout=Path(log), stderr=Path(log), server=server)
while child.ready() is None:
    time.sleep(0.01)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


def start(folder: RunFolder, server: ForkServer | None, *words: str) -> ChildProcess:
    """A `child.py` that is up."""
    log = folder.log("child")
    process = ChildProcess((*CHILD, *words), stdout=log, stderr=log, server=server)
    until(lambda: process.ready() is not None, "the child's ready line")
    return process


@pytest.mark.parametrize("how", ["executed", "forked"])
def test_a_deaf_child_is_killed_with_its_children(
    folder: RunFolder, how: str, tmp_path: Path
) -> None:
    server = fork_server() if how == "forked" else None
    process = start(folder, server, str(tmp_path / "pid"))
    grandchild = int((tmp_path / "pid").read_text())
    process.kill()
    until(lambda: process.poll() is not None, "the child's end")
    assert process.poll() == -signal.SIGKILL
    assert process.usage.cpu_s > 0
    until(lambda: not is_alive(grandchild), "the grandchild's end")


@pytest.mark.parametrize("how", ["executed", "forked"])
def test_children_die_with_a_killed_supervisor(folder: RunFolder, how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder.log("child")), how, *CHILD],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    readable, _, _ = select.select([parent.stdout], [], [], limit(20.0))
    assert readable, "the parent started no child"
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.kill()
    parent.communicate()
    until(lambda: not is_alive(child), "the orphan's end")
    assert folder.log("child").read_text() == "draining\n"  # it had the time to end in order


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


def test_children_do_not_see_what_is_resolved_already_and_copy_past_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UMBRA_RUN__STEPS", "7")
    monkeypatch.setenv("UMBRA_BROKER", "tcp://h:1")
    monkeypatch.setenv("PYTHONPATH", "before")
    copies, check = "glibc.cpu.x86_non_temporal_threshold", "glibc.malloc.check=1"
    for given, expected in (
        ("", f"{copies}=0x100000"),
        (check, f"{check}:{copies}=0x100000"),
        (f"{copies}=0x5000000", f"{copies}=0x5000000"),  # as they are told
    ):
        monkeypatch.setenv(TUNABLES, given)
        environ = child_environ([Path("/here"), Path("/there")])
        assert environ[TUNABLES] == expected
    assert "UMBRA_RUN__STEPS" not in environ
    assert "UMBRA_BROKER" not in environ  # of another run, which is watched
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
