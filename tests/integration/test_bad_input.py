"""What goes wrong when a run is put together by hand, one clear sentence each; real commands."""

import socket
from pathlib import Path

import pytest
from fakes.commands import UMBRA, call

NOBODY = "tcp://127.0.0.1:9"
ANY = "tcp://127.0.0.1:*"


def refused(code: int, *words: str, cwd: Path) -> str:
    """The sentence with which `umbra` ends, and the exit code that it should end with."""
    done = call([*UMBRA, *words], cwd=cwd, quiet_s=120.0)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("umbra: error: ")]
    return sentence.removeprefix("umbra: error: ")


SERVICES = {
    "weight-hub --upstream": (NOBODY, "--set", f"weight_hub.listen={ANY}"),
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


def test_a_port_in_use(project: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        told = refused(3, "buffer", "--config", "run.toml", "--broker", address, cwd=project)
    assert told == (f"{address} is in use by another process: stop it or choose another port")


def test_a_half_written_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nsteps = 10\n[mod")
    told = refused(2, "buffer", "--config", "run.toml", cwd=tmp_path)
    assert told.startswith("run file run.toml is not valid TOML: ")
