"""Warm starts of docs/training.md, on a tiny model: TRL's fine-tuning, then a run."""

import json
import re
import sys
from pathlib import Path

import pytest
from fakes.commands import call
from safetensors.torch import load_file

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
# Less of it, and what the page says of machines without a GPU.
HERE = {
    "max_steps=100": "max_steps=3",
    "learning_rate=1e-5": "learning_rate=1e-2",
    'report_to="none"': 'report_to="none", use_cpu=True',
}


def block(language: str) -> str:
    text = PAGE.read_text(encoding="utf-8").partition("\n## Warm starts\n")[2]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[0]


def python(folder: Path, *words: str) -> str:
    """Return the output of a Python program in `folder`."""
    done = call(
        [sys.executable, *words],
        cwd=folder,
        env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")},
        quiet_s=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("warm")
    (folder / "model").symlink_to(tiny_model_dir)
    example = json.loads(block("json"))
    (folder / "chats.jsonl").write_text(f"{json.dumps(example)}\n" * 16, encoding="utf-8")
    row = json.loads(re.findall(r'# (\{"prompt".*\}) per line', block("toml"))[0])
    (folder / "prompts.jsonl").write_text(f"{json.dumps(row)}\n" * 8, encoding="utf-8")
    script = block("python")
    for full, less in HERE.items():
        assert full in script
        script = script.replace(full, less)
    (folder / "sft.py").write_text(script, encoding="utf-8")
    (folder / "run.toml").write_text(block("toml"), encoding="utf-8")
    python(folder, "sft.py")
    return folder


def test_what_was_learned_is_what_the_run_begins_with(warm: Path) -> None:
    before = load_file(warm / "model" / "model.safetensors")
    after = load_file(warm / "warm" / "model.safetensors")
    moved = [name for name in after if not after[name].equal(before[name].to(after[name]))]
    assert len(moved) > len(after) // 2
    told = python(warm, "-m", "umbra", "check", "run.toml")
    assert told.startswith("run.toml: good")
    assert str(warm / "warm") in told


def test_the_run_trains_it_on(warm: Path) -> None:
    settings = {
        "run.steps": 2,
        "buffer.group_size": 2,
        "buffer.batch_groups": 2,
        "sampling.max_tokens": 8,
        "generator.max_context": 128,
        "generator.threads": 1,
        "trainer.threads": 1,
        "trainer.entropy_coef": 0.001,
    }
    sets = [f"--set={key}={value}" for key, value in settings.items()]
    python(warm, "-m", "umbra", "up", "run.toml", "--quiet", *sets)
    (run,) = (warm / "runs").iterdir()
    assert (run / "model" / "model.safetensors").is_file()
