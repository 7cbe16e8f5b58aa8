"""Whole runs of other models: of one on the hub, and of one that was warmed up as docs tell."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.commands import UMBRA, call
from fakes.hub import environment, serving
from fakes.whole_runs import sets
from safetensors.torch import load_file

SETTINGS = (
    *("model.path=acme/tiny", "trainer.lora_rank=2", "run.steps=2", "checkpoint.every=2"),
    *("data.columns.prompt=question", "eval.columns.prompt=question", "eval.samples=8"),
    *("data.prompts=sums.jsonl", "eval.prompts=sums.jsonl"),
)


@pytest.mark.real  # two whole runs
def test_from_a_name_to_a_name(project: Path) -> None:
    with serving() as hub:
        variables = {**environment(hub, project / "home"), "XDG_CACHE_HOME": str(project / "cache")}

        def up(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
            return call([*UMBRA, "up", *words], cwd=project, env=variables | more, quiet_s=150)

        commit = hub.add_model("acme/tiny", (project / "model").resolve())
        rows = (project / "prompts.jsonl").read_text().replace('"prompt"', '"question"')
        (project / "model").unlink()
        (project / "prompts.jsonl").unlink()
        (project / "sums.jsonl").write_text(rows)
        done = up("run.toml", "--json", *sets(*SETTINGS))
        assert done.returncode == 0, done
        (folder,) = (project / "runs").iterdir()
        config = json.loads((folder / "config.json").read_bytes())
        assert config["model"]["path"] == f"acme/tiny@{commit}"
        files = [one for one in hub.requests if one.startswith("GET") and "/resolve/" in one]
        assert len(files) == len(set(files)), "each was downloaded once, by whichever process"

        # What the run needs is in the caches now, and it began from a commit: the branch moves on.
        hub.add("models/acme/tiny", {"config.json": b"{}"})
        more = up(str(folder), "--set", "run.steps=3", "--quiet", HF_HUB_OFFLINE="1")
        assert more.returncode == 0, more


# -- warm starts of docs/training.md: TRL's fine-tuning, then a run --------------------------------

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
