"""Commands of a run with keys: what they refuse, and where its secrets never show."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.commands import UMBRA, call
from fakes.slowness import limit
from fakes.waiting import until

from umbra.proto.net.keys import load_keys
from umbra.services.process.child import ChildProcess

WAIT_S = limit(20.0)


def umbra(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return call([*UMBRA, *arguments], cwd=cwd)


def test_what_others_can_reach_is_not_bound_without_keys(tmp_path: Path) -> None:
    listen = ("--set", "weight_hub.listen=tcp://*:*")
    done = umbra("weight-hub", "--upstream", "tcp://h:9", *listen, cwd=tmp_path)
    assert done.returncode == 2, done
    line = [line for line in done.stderr.splitlines() if line.startswith("umbra: error: ")]
    assert len(line) == 1
    assert "`umbra keys FOLDER` and give every process --keys FOLDER" in line[0]


@pytest.fixture
def buffer(tmp_path: Path, keys: Path) -> Iterator[str]:
    """A buffer process with keys, bound in public; the address of its control socket."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    log, run = tmp_path / "buffer.log", tmp_path / "run"
    command = [
        *UMBRA, "buffer", "--broker", "tcp://0.0.0.0:*", "--keys", str(keys), "--run-dir",
        str(run), "--set", "log.level=debug", "--set", f"data.prompts={tmp_path / 'p.jsonl'}",
    ]  # fmt: skip
    process = ChildProcess(command, stdout=log, stderr=log)
    port = until(process.ready, log.read_text)["broker"].rpartition(":")[2]
    for name in ("cmdline", "environ"):
        shown = Path(f"/proc/{process.pid}/{name}").read_bytes()
        assert load_keys(keys, "buffer").secret not in shown
    yield f"tcp://127.0.0.1:{port}"
    process.terminate()
    process.wait(WAIT_S)
    secrets = [load_keys(keys, role).secret for role in ("buffer", "monitor", "operator")]
    written = b"".join(path.read_bytes() for path in (log, *run.rglob("*")) if path.is_file())
    assert b"refused" in written, "the log is not there"
    assert not any(secret in written for secret in secrets)


def test_the_monitor_commands_use_keys(buffer: str, keys: Path, tmp_path: Path) -> None:
    """Its fixture looks for secrets in the process list, the log and the run's folder."""
    outsider = umbra("status", "--broker", buffer, cwd=tmp_path)
    assert outsider.returncode == 4
    assert len(outsider.stderr.splitlines()) == 1
    assert "--keys" in outsider.stderr
    shown = umbra("status", "--broker", buffer, "--keys", str(keys), "--json", cwd=tmp_path)
    refused = json.loads(shown.stdout)["refused"]
    assert any(what.endswith(" on control") for what in refused)
    plain = umbra("status", "--broker", buffer, "--keys", str(keys), cwd=tmp_path)
    assert f"refused: {next(iter(refused))}" in plain.stdout
    (tmp_path / "m").mkdir()
    for path in (*keys.glob("*.key"), keys / "monitor.key_secret"):
        shutil.copy(path, tmp_path / "m")
    looks = umbra("status", "--ping", "--broker", buffer, "--keys", "m", cwd=tmp_path)
    assert looks.returncode == 0, looks
    changes = umbra("pause", "--broker", buffer, "--keys", "m", cwd=tmp_path)
    assert changes.returncode == 4
    assert "not allowed with the monitor key" in changes.stderr
    allowed = umbra("pause", "--broker", buffer, "--keys", str(keys), cwd=tmp_path)
    assert allowed.returncode == 0, allowed
