"""One run with five environments from five worlds, none of which was changed for it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.fixtures import UMBRA
from fakes.library_environments import AGENT, OPENENV, TRL, VERIFIERS_V0, VERIFIERS_V1
from fakes.library_worlds import library_python
from fakes.slowness import seconds

STEPS = 6
RUN = """
[run]
name = "five"
steps = {steps}
stop_s = 30.0
[model]
path = "model"
[sampling]
max_tokens = 24
stop_tokens = {stops}
[buffer]
group_size = 4
batch_groups = 5
lease_s = 120.0
dead_after_s = 120.0
[generator]
device = "cpu"
threads = 1
slots = 20
prefetch = 4
max_context = 2048
[trainer]
device = "cpu"
threads = 1
learning_rate = 1e-3
batch_wait_s = 1800.0
"""
LIMITS = """
run_on = "{run_on}"
workers = 1
memory_mb = 0
setup_s = 900.0
timeout_s = 600.0
max_tokens = 400
"""


def environment(run_on: str, name: str, kind: str, **keys: Any) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    head = f'[[environments]]\nname = "{name}"\nkind = "{kind}"\nprompts = "{name}.jsonl"'
    return "\n".join([head, *lines]) + LIMITS.format(run_on=run_on)


@pytest.mark.real
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("run_on", ["generator", "env_worker"])
def test_five_worlds_train_side_by_side(tmp_path: Path, tiny_model: Path, run_on: str) -> None:
    pythons = {name: library_python(name) for name in ("verifiers-v0", "verifiers-v1", "openenv")}
    (tmp_path / "model").symlink_to(tiny_model)
    sources = {
        "old_package": VERIFIERS_V0,
        "new_taskset": VERIFIERS_V1,
        "game_server": OPENENV,
        "trl_class": TRL,
        "openai_agent": AGENT,
    }
    for module, source in sources.items():
        (tmp_path / f"{module}.py").write_text(source)
    for module, library in (("old_package", "verifiers-v0"), ("new_taskset", "verifiers-v1")):
        umbra(
            tmp_path, "make-task", f"verifiers:{module}", "--out", module, "--heldout", "1",
            "--python", pythons[library],
        )  # fmt: skip
        (tmp_path / module / "prompts.jsonl").rename(tmp_path / f"{module}.jsonl")
    for name in ("game_server", "trl_class", "openai_agent"):
        rows = [{"prompt": f"play {n}", "target": n} for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = RUN.format(steps=STEPS, stops=json.dumps(list("abcdefghijklmn")))
    worlds: list[dict[str, Any]] = [
        {"name": "old_package", "kind": "verifiers", "python": pythons["verifiers-v0"]},
        {"name": "new_taskset", "kind": "verifiers", "python": pythons["verifiers-v1"]},
        {"name": "game_server", "kind": "openenv", "python": pythons["openenv"]},
        {"name": "trl_class", "kind": "trl"},
        {"name": "openai_agent", "kind": "agent", "agent": "openai_agent:solve"},
    ]
    ids = {"game_server": "game_server:app", "trl_class": "trl_class:Sums"}
    for world in worlds:
        own: dict[str, Any] = (
            {} if "agent" in world else {"id": ids.get(world["name"], world["name"])}
        )
        text += environment(run_on, **world, **own)
    (tmp_path / "run.toml").write_text(text)
    umbra(tmp_path, "up", "run.toml")
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    trained = {
        name: sum(row.get(f"environment/{name}/samples", 0.0) for row in steps) for name in sources
    }
    assert sum(trained.values()) == STEPS * 20
    assert min(trained.values()) > 0, trained
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mismatch_k3_on_policy"] < 1e-5
    assert summary["ledger"]["balance"] == 0
    assert summary["ledger"]["trained"] == STEPS * 20
    assert not summary["ledger"]["ended"].get("failed"), summary["ledger"]


def umbra(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [*UMBRA, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds(2400),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
