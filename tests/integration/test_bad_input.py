"""What goes wrong when a run is put together by hand, one clear sentence each; real commands."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from fakes.commands import UMBRA, call
from fakes.crash_run import BufferProcess, Peer

NOBODY = "tcp://127.0.0.1:9"
ANY = "tcp://127.0.0.1:*"


def refused(code: int, *words: str, cwd: Path) -> str:
    """The sentence with which `umbra` ends, and the exit code that it should end with."""
    done = call([*UMBRA, *words], cwd=cwd, quiet_s=120.0)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("umbra: error: ")]
    return sentence.removeprefix("umbra: error: ")


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[BufferProcess]:
    folder = tmp_path / "buffer"
    folder.mkdir()
    process = BufferProcess(folder)
    yield process
    process.close()


SERVICES = {
    "weight-hub": (),
    "weight-hub --upstream": (NOBODY, "--listen", ANY),
    "scorer": ("--stage", "reward"),
    "generator": (),
    "trainer": ("--run-dir", "out"),
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_broker_that_is_not_there(project: Path, service: str) -> None:
    own = (*service.split(), *SERVICES[service], "--config", "run.toml", "--broker", NOBODY)
    told = refused(3, *own, "--set", "run.broker_grace_s=1", cwd=project)
    assert told == (
        f"no broker answers at {NOBODY} within 1 s: check --broker, and that `umbra buffer` is "
        "running"
    )


@pytest.mark.parametrize(
    ("service", "address"), [("trainer", "10.0.0.1:5555"), ("weight-hub", "tcp://10.0.0.1:*")]
)
def test_an_address_that_is_none(project: Path, service: str, address: str) -> None:
    own = (*service.split(), *SERVICES[service], "--config", "run.toml", "--broker", address)
    told = refused(2, *own, "--set", "run.broker_grace_s=1", cwd=project)
    assert address in told
    assert "write it as tcp://host:port" in told


@pytest.mark.parametrize(
    "words",
    [
        ("buffer", "--config", "run.toml", "--broker", "{}"),
        ("weight-hub", "--broker", NOBODY, "--listen", "{}"),
        ("weight-hub", "--upstream", NOBODY, "--listen", "{}"),
    ],
)
def test_a_port_in_use(project: Path, words: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        told = refused(3, *(word.format(address) for word in words), cwd=project)
    assert told == (f"{address} is in use by another process: stop it or choose another port")


@pytest.mark.parametrize("command", [("up",), ("check",), ("buffer", "--config")])
def test_a_half_written_run_file(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "run.toml").write_text("[run]\nsteps = 10\n[mod")
    told = refused(2, *command, "run.toml", cwd=tmp_path)
    assert told.startswith("run file run.toml is not valid TOML: ")


def test_a_second_trainer(
    buffer: BufferProcess, project: Path, zmq_context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    first = Peer(zmq_context, buffer.broker, "trainer", "trainer")
    own = ("trainer", "--config", "run.toml", "--run-dir", "out", "--name", "trainer-2")
    told = refused(4, *own, "--broker", buffer.broker, cwd=project)
    first.close()
    assert told.endswith(
        "the run already has the trainer 'trainer' (pid 1 on h): stop it first, or restart it "
        "under its own name"
    )
