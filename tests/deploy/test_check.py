"""`umbra check`: the meaning of each fact of a machine, and its message."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.commands import SEARCH
from fakes.slowness import limit

from umbra import cli
from umbra.deploy.check import machine
from umbra.deploy.check.machine import GIB, Gpu, GpuReport
from umbra.proto.errors import UmbraError
from umbra.proto.net.keys import make_keys

H200 = Gpu("H200", 140 * GIB, 139 * GIB)
NONE = GpuReport([], "this torch is built without CUDA")


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    two = GpuReport([H200, H200])
    assert machine.judge_gpus(two, "580.1", 2).level == "ok"
    assert machine.judge_gpus(two, "580.1", 3).level == "problem"
    found = machine.judge_gpus(GpuReport([H200, Gpu("H200", 140 * GIB, 20 * GIB)]), "580.1", 2)
    assert (found.level, found.remedy[-5:]) == ("warning", "GPU 1")
    assert machine.judge_gpus(NONE, "580.1", 0).level == "problem"  # the driver is there

    def hangs(_kind: object) -> GpuReport:
        raise UmbraError("it took longer than 180 s")

    monkeypatch.setattr(machine, "ask_aside", hangs)
    monkeypatch.setattr(machine, "gpu_report", machine.gpu_report.__wrapped__)
    monkeypatch.setattr(machine, "driver_version", lambda: "")
    assert machine.find_gpus(0).text == "none"
    found = machine.find_gpus(1)
    assert (found.level, found.text[-25:]) == ("problem", "it took longer than 180 s")
    assert found.remedy.startswith("see whether nvidia-smi answers")


def test_memory_and_files() -> None:
    assert machine.shared_memory(8 * GIB, 8 * GIB, 4 * GIB).level == "ok"
    full = machine.shared_memory(GIB, 8 * GIB, 4 * GIB)
    assert (full.level, full.text) == ("problem", "1 GiB free of 8 GiB, the run needs 4 GiB")
    assert "--shm-size" in full.remedy
    assert machine.shared_memory(64 << 20, 64 << 20, None).level == "warning"
    assert machine.host_memory(8 * GIB, 8 * GIB, 9 * GIB).level == "problem"
    assert machine.host_memory(9 * GIB, 9 * GIB, 9 * GIB).level == "ok"
    assert machine.open_files().subject == "open files"


def test_keys(tmp_path: Path) -> None:
    """As they are made; readable by all; and none."""
    make_keys(tmp_path / "keys")
    check = machine.keys(tmp_path / "keys", "")
    assert check.level == "ok" and "trainer" in check.text
    (tmp_path / "keys" / "trainer.key_secret").chmod(0o644)
    found = machine.keys(tmp_path / "keys", "")
    assert found.level == "problem" and "open it to every user" in found.text
    assert found.remedy == f"chmod 600 {tmp_path}/keys/trainer.key_secret"
    assert machine.keys(None, "").level == "ok"
    assert machine.keys(None, "tcp://10.0.0.1:5555").level == "warning"
    assert machine.keys(tmp_path / "none", "").level == "problem"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        (found,) = machine.ports(["tcp://127.0.0.1:*", taken])
    assert found.level == "problem" and "in use by another process" in found.text
    assert next(machine.ports(["tcp://127.0.0.1:0"])).level == "ok"


@pytest.mark.parametrize(("free", "level"), [(50, "ok"), (5, "warning"), (1, "problem")])
def test_a_disk_is_measured_where_the_folder_will_be(
    free: int, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=free * GIB)
    monkeypatch.setattr(machine.shutil, "disk_usage", {tmp_path: usage}.__getitem__)
    found = machine.disk(tmp_path / "runs" / "new")
    assert (found.level, found.text) == (level, f"{free} GiB free at {tmp_path}")
    assert list(tmp_path.iterdir()) == []
    found = machine.disk(Path("/proc/new"))
    assert (found.level, found.text) == ("problem", "/proc cannot be written to")


@pytest.mark.parametrize("words", [["--show"], ["--gpu", "l4-24"], ["nowhere.toml"]])
def test_misuse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *words]) == 2
    assert capsys.readouterr().err.startswith("umbra: error: ")


def test_without_a_run_the_machine_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--json"]) in (0, 2)
    told = json.loads(capsys.readouterr().out)
    assert {"versions", "GPUs", "plane shm", "/dev/shm", "host memory"} <= {
        one["subject"] for one in told["checks"]
    }


EVIL = """
from pathlib import Path
from types import SimpleNamespace

Path("evil-ran").touch()

def rows():
    return ["say a"]

def score(prompt, completion, row):
    return 0.0
"""


@pytest.mark.parametrize("flags", [[], ["--no-code"]])
def test_code_of_the_run_file_runs_unless_it_is_asked_not_to(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{tiny_model_dir}"\n[data]\nprompts = "evil:rows"\n'
        '[environment]\nkind = "reward"\nreward = "evil:score"\n'
    )
    cli.main(["check", "run.toml", *flags])
    assert (tmp_path / "evil-ran").exists() != bool(flags)


ALONE = """
import sys
from umbra import cli
code = cli.main(["check", "run.toml", *sys.argv[1:]])
print(", ".join({"torch"} & {*sys.modules}) or "no torch")
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("flags", "code", "told"),
    [
        ([], 0, "Nothing to do."),
        (["--set", "environment.kind=guess", "--set", "trainer.lora_rank=4"], 0, "run.toml: good"),
        (["--set", "trainer.lora_rank=4", "--set", 'trainer.lora_targets=["nope"]'], 2, "q_proj"),
        (["--set", "weight_hub.slots=1000000"], 2, "run.toml: has a problem, see below"),
    ],
)
def test_a_check_of_an_ordinary_model_does_without_torch(
    tmp_path: Path, tiny_model_dir: Path, flags: list[str], code: int, told: str
) -> None:
    """A process of its own, as torch is loaded in this one; a build is left to another one."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say 3", "answer": "3"}\n' * 16)
    (tmp_path / "run.toml").write_text(
        f'[model]\npath = "{tiny_model_dir}"\n[data]\nprompts = "prompts.jsonl"\n'
        '[environment]\nkind = "exact"\n'
    )
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *flags],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": SEARCH}, capture_output=True, text=True,
        timeout=limit(120), check=False,
    )  # fmt: skip
    assert (done.returncode, told in done.stdout + done.stderr) == (code, True), done
    assert done.stdout.splitlines()[-1] == "no torch"
