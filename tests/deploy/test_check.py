"""`umbra check`: each fact of a machine, and its message; `umbra init`, which writes run files."""

import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.commands import call
from fakes.whole_runs import sets

from umbra import cli
from umbra.deploy.check import machine
from umbra.deploy.check.choose import choose
from umbra.deploy.check.estimate import Estimate
from umbra.deploy.check.machine import GIB, Gpu, GpuReport, Machine
from umbra.deploy.check.model_sizes import read_sizes
from umbra.deploy.commands.init import REWARDS, run_file
from umbra.proto.errors import UmbraError
from umbra.proto.net.keys import make_keys
from umbra.services.config.loader import given_keys, load_config, load_tree
from umbra.services.config.rules import cautions, check_feasible
from umbra.services.modeling.row_sizes import CPU_PASS, rows_within

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


def test_a_disk_is_measured_where_the_folder_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, level in ((50, "ok"), (5, "warning"), (1, "problem")):
        usage = {tmp_path: SimpleNamespace(free=free * GIB)}
        monkeypatch.setattr(machine.shutil, "disk_usage", usage.__getitem__)
        found = machine.disk(tmp_path / "runs" / "new")
        assert (found.level, found.text) == (level, f"{free} GiB free at {tmp_path}")
    assert list(tmp_path.iterdir()) == []
    found = machine.disk(Path("/proc/new"))
    assert (found.level, found.text) == ("problem", "/proc cannot be written to")


# -- the command -----------------------------------------------------------------------------------

CODE = """
from pathlib import Path

Path("it-ran").touch()

def rows():
    print("rows are made")  # which is not in the way of the JSON
    return ["say a"]

def score(prompt, completion, row):
    return 0.0
"""


@pytest.fixture
def here(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say 3", "answer": "3"}\n' * 16)
    (tmp_path / "run.toml").write_text(
        f'model.path = "{tiny_model_dir}"\ndata.prompts = "prompts.jsonl"\n'
        'environment.kind = "exact"\n'
        "generator.max_context = 64\ntrainer = { pack_tokens = 64, micro_tokens = 128 }\n"
    )
    return tmp_path


def test_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "run.toml", "--gpu", "l4-24"]) == 0
    text = capsys.readouterr().out
    for part in ("memory:    GPU 0 ", "% left", "host ", "/dev/shm "):
        assert part in text
    assert cli.main(["check", "run.toml", "--gpu", "l4-24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["estimate"]
    assert found["fits"] is True
    assert found["processes"][0]["device"][0]["name"] == "weights, float32"
    assert cli.main(["check", "--json"]) in (0, 2)  # without a run the machine is shown
    told = json.loads(capsys.readouterr().out)
    assert {"versions", "GPUs", "plane shm", "/dev/shm", "host memory"} <= {
        one["subject"] for one in told["checks"]
    }
    for words in (["--show"], ["--gpu", "l4-24"], ["nowhere.toml"]):
        assert cli.main(["check", *words]) == 2
        assert capsys.readouterr().err.startswith("umbra: error: ")


def test_rows_of_auto_are_those_of_the_trainer(here: Path) -> None:
    auto = ("trainer.pack_tokens=auto", "trainer.micro_tokens=auto")
    config = load_config("run.toml", overrides=auto)
    sizes, on = read_sizes(config), Machine(host=1 << 34)
    chosen = rows_within(config.trainer, sizes.config, CPU_PASS, "cpu", config.sampling.max_tokens)
    numbers = [f"trainer.{name}={value}" for name, value in chosen._asdict().items()]
    known = load_config("run.toml", overrides=numbers)
    assert Estimate(config, sizes, on).needs == Estimate(known, sizes, on).needs


def test_what_does_not_fit_is_a_problem_with_a_remedy(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Machine(host=1 << 30, shm=1)
    monkeypatch.setattr("umbra.deploy.check.command.this_machine", lambda: small)
    assert cli.main(["check", "run.toml", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    problems = [one for one in told["checks"] if one["level"] == "problem"]
    assert {one["subject"] for one in problems} == {"memory"}
    assert any("/dev/shm has 1 B" in one["text"] for one in problems)
    assert any("the host has 1 GiB" in one["text"] for one in problems)
    assert all(one["remedy"] for one in problems)


def test_code_of_the_run_file_runs_unless_it_is_asked_not_to(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "sub").mkdir()
    (here / "run.toml").rename(here / "sub" / "run.toml")
    (here / "sub" / "ran_by_check.py").write_text(CODE)
    settings = (
        "data.prompts=ran_by_check:rows",
        "environment.kind=reward",
        "environment.reward=ran_by_check:score",
    )
    for flags in (["--no-code"], []):
        assert cli.main(["check", "sub/run.toml", "--json", *sets(*settings), *flags]) == 0
        assert json.loads(capsys.readouterr().out)["ok"]
        assert (here / "it-ran").exists() != bool(flags)


ALONE = """
import sys
from umbra import cli
code = cli.main(["check", "run.toml", *sys.argv[1:]])
print(", ".join({"torch"} & {*sys.modules}) or "no torch")
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("settings", "code", "told"),
    [
        ((), 0, "Nothing to do."),
        (("environment.kind=guess", "trainer.lora_rank=4"), 0, "run.toml: good"),
        (("trainer.lora_rank=4", 'trainer.lora_targets=["nope"]'), 2, "q_proj"),
        (("weight_hub.slots=1000000",), 2, "run.toml: has a problem, see below"),
    ],
)
def test_a_check_of_an_ordinary_model_does_without_torch(
    here: Path, settings: tuple[str, ...], code: int, told: str
) -> None:
    """A process of its own, as torch is loaded in this one; a build is left to another one."""
    done = call([sys.executable, "-c", ALONE, *sets(*settings)], cwd=here, quiet_s=120)
    assert (done.returncode, told in done.stdout + done.stderr) == (code, True), done
    assert done.stdout.splitlines()[-1] == "no torch"


# -- `umbra init`, whose files can be run ----------------------------------------------------------


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "my task"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("gpus", "device"), [(0, "auto"), (1, "auto"), (2, "cuda:1")])
@pytest.mark.parametrize("reward", REWARDS)
def test_every_run_file_is_sound(gpus: int, device: str, reward: str, empty: Path) -> None:
    keys = {"name": "r", "model": 'a "model"', "prompts": "p\\q.jsonl", "reward": reward}
    text = run_file(gpu=gpus > 0, file="run.toml", **keys)
    Path("run.toml").write_text(text)
    config = load_config("run.toml", environ={})
    check_feasible(config)
    assert list(cautions(config)) == []
    assert (config.model.path, config.data.prompts) == ('a "model"', "p\\q.jsonl")
    assert (config.generator.slots, config.buffer.batch_groups) == ((128, 32) if gpus else (32, 8))
    gpu_machine = Machine((80 * GIB,) * gpus, vllm=True, cores=8)
    chosen = choose(config, given_keys(load_tree("run.toml", environ={})), gpu_machine, 40_960)
    assert chosen.generator.device == device
    assert chosen.generator.engine == ("vllm" if gpus else "torch")
    assert chosen.generator.threads == chosen.trainer.threads == (0 if gpus else 4)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_check_of_it_is_clean_but_for_a_missing_model(
    empty: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init"]) == 0
    assert "next:\n  name a model: model.path in run.toml\n  umbra" in capsys.readouterr().out
    assert load_config("run.toml", environ={}).run.name == "my-task"
    assert cli.main(["check", "run.toml"]) == 2
    assert "model.path is empty: name a" in capsys.readouterr().err
    Path("model").symlink_to(tiny_model_dir)
    assert cli.main(["check", "run.toml", "--set", "model.path=model"]) == 0
    assert "run.toml: good" in capsys.readouterr().out


def test_nothing_is_overwritten(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("reward.py").write_text("mine")
    assert cli.main(["init"]) == 2
    assert "reward.py would be overwritten: name another folder" in capsys.readouterr().err
    assert os.listdir() == ["reward.py"]
    assert cli.main(["init", "--reward", "exact"]) == 0
    assert Path("reward.py").read_text() == "mine"
    assert cli.main(["init", "--reward", "exact"]) == 2
    assert "run.toml and prompts.jsonl would be overwritten" in capsys.readouterr().err
    Path("mine.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    words = ["--prompts", "mine.jsonl", "--model", "an-org/a-model"]
    assert cli.main(["init", "new/one", *words]) == 0
    assert "next:\n  umbra check new/one/run.toml\n  umbra up new/" in capsys.readouterr().out
    assert sorted(os.listdir("new/one")) == ["reward.py", "run.toml"]
    config = load_config("new/one/run.toml", environ={})
    assert (config.model.path, config.data.prompts) == ("an-org/a-model", "mine.jsonl")
