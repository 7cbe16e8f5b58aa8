"""`umbra init`: what it writes can be run, and it overwrites nothing."""

import os
from pathlib import Path

import pytest

from umbra import cli
from umbra.deploy.check.choose import choose
from umbra.deploy.check.machine import Machine
from umbra.deploy.commands.init import REWARDS, run_file
from umbra.services.config.loader import given_keys, load_config, load_tree
from umbra.services.config.rules import cautions, check_feasible


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my task"
    folder.mkdir()
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(("gpus", "device"), [(0, "auto"), (1, "auto"), (2, "cuda:1")])
@pytest.mark.parametrize("reward", REWARDS)
def test_every_run_file_is_sound(gpus: int, device: str, reward: str) -> None:
    keys = {"name": "r", "model": 'a "model"', "prompts": "p\\q.jsonl", "reward": reward}
    text = run_file(gpu=gpus > 0, file="run.toml", **keys)
    Path("run.toml").write_text(text)
    config = load_config("run.toml", environ={})
    check_feasible(config)
    assert list(cautions(config)) == []
    assert (config.model.path, config.data.prompts) == ('a "model"', "p\\q.jsonl")
    assert (config.generator.slots, config.buffer.batch_groups) == ((128, 32) if gpus else (32, 8))
    machine = Machine((80 << 30,) * gpus, vllm=True, cores=8)
    chosen = choose(config, given_keys(load_tree("run.toml", environ={})), machine, 40_960)
    assert chosen.generator.device == device
    assert chosen.generator.engine == ("vllm" if gpus else "torch")
    assert chosen.generator.threads == chosen.trainer.threads == (0 if gpus else 4)
    assert all(len(line) <= 100 for line in text.splitlines())


def test_a_check_of_it_is_clean_but_for_a_missing_model(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["init"]) == 0
    assert load_config("run.toml", environ={}).run.name == "my-task"
    assert cli.main(["check", "run.toml"]) == 2
    assert "model.path: " in capsys.readouterr().err
    Path("model").symlink_to(tiny_model_dir)
    assert cli.main(["check", "run.toml"]) == 0
    assert "run.toml: good" in capsys.readouterr().out


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "up new/one/run.toml" in capsys.readouterr().out
    assert sorted(os.listdir("new/one")) == ["reward.py", "run.toml"]
    config = load_config("new/one/run.toml", environ={})
    assert (config.model.path, config.data.prompts) == ("an-org/a-model", "mine.jsonl")
