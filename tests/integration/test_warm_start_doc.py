"""Warm starts of docs/training.md, on a tiny model: TRL's fine-tuning, then a run."""

import json
import re
import sys
from pathlib import Path

import pytest
from fakes.commands import call
from fakes.whole_runs import sets
from safetensors.torch import load_file

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
# Less of it, and what the page says of machines without a GPU.
HERE = {
    "max_steps=100": "max_steps=3",
    "learning_rate=1e-5": "learning_rate=1e-2",
    'report_to="none"': 'report_to="none", use_cpu=True',
}
SMALL = (
    *("run.steps=2", "buffer.group_size=2", "buffer.batch_groups=2", "sampling.max_tokens=8"),
    *("generator.max_context=128", "generator.threads=1", "trainer.threads=1"),
)


def block(language: str) -> str:
    text = PAGE.read_text(encoding="utf-8").partition("\n## Warm starts\n")[2]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)[0]


@pytest.mark.real
@pytest.mark.timeout(900)
def test_the_run_begins_with_what_was_learned(tmp_path: Path, tiny_model_dir: Path) -> None:
    def python(*words: str) -> str:
        env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        done = call([sys.executable, *words], cwd=tmp_path, env=env, quiet_s=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "model").symlink_to(tiny_model_dir)
    example = json.dumps(json.loads(block("json")))
    (tmp_path / "chats.jsonl").write_text(f"{example}\n" * 16, encoding="utf-8")
    row = json.dumps(json.loads(re.findall(r'# (\{"prompt".*\}) per line', block("toml"))[0]))
    (tmp_path / "prompts.jsonl").write_text(f"{row}\n" * 8, encoding="utf-8")
    script = block("python")
    for full, less in HERE.items():
        assert full in script
        script = script.replace(full, less)
    (tmp_path / "sft.py").write_text(script, encoding="utf-8")
    (tmp_path / "run.toml").write_text(block("toml"), encoding="utf-8")
    python("sft.py")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "warm"))
    moved = [name for name in after if not after[name].equal(before[name].to(after[name]))]
    assert len(moved) > len(after) // 2
    assert str(tmp_path / "warm") in python("-m", "umbra", "check", "run.toml")
    python("-m", "umbra", "up", "run.toml", "--quiet", *sets(*SMALL))
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "model" / "model.safetensors").is_file()
