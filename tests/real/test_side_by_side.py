"""Runs with five environments from five worlds, none of which was changed, and with each alone."""

import json
import subprocess
from pathlib import Path

import pytest
from fakes.fixtures import UMBRA
from fakes.library_environments import AGENT, OPENENV, TRL, VERIFIERS_V0, VERIFIERS_V1
from fakes.library_worlds import library_python
from fakes.slowness import seconds
from fakes.waiting import until
from fault.test_runner_kill import endpoints as urls_of

STEPS = 6
RUN = """
[run]
name = "five"
steps = {steps}
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
{serve}
device = "cpu"
threads = 1
slots = 20
max_context = 2048
[trainer]
device = "cpu"
threads = 1
learning_rate = 1e-3
entropy_coef = 1e-3  # some worlds reward a random model always alike, which alone trains nothing
"""
LIMITS = """
workers = {workers}
memory_mb = 0
timeout_s = 600.0
max_tokens = 400
"""
# By name: the module, the library that it needs, and the keys of its environment.
WORLDS: dict[str, tuple[str, str, dict[str, str]]] = {
    "old_package": (VERIFIERS_V0, "verifiers-v0", {"kind": "verifiers", "id": "old_package"}),
    "new_taskset": (VERIFIERS_V1, "verifiers-v1", {"kind": "verifiers", "id": "new_taskset"}),
    "game_server": (OPENENV, "openenv", {"kind": "openenv", "id": "game_server:app"}),
    "trl_class": (TRL, "", {"kind": "trl", "id": "trl_class:Sums"}),
    "openai_agent": (AGENT, "", {"kind": "agent", "agent": "openai_agent:solve"}),
}


def environment(place: str, name: str, **keys: str) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    head = f'[[environments]]\nname = "{name}"\nprompts = "{name}.jsonl"'
    return "\n".join([head, *lines]) + LIMITS.format(workers=int(place == "generator"))


@pytest.mark.real
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("generator", list(WORLDS)),
        ("runner", list(WORLDS)),
        *(("runner", [name]) for name in WORLDS),
    ],
    ids=["generator", "runner", *WORLDS],
)
def test_worlds_train_side_by_side_and_alone(
    tmp_path: Path, tiny_model: Path, place: str, names: list[str]
) -> None:
    (tmp_path / "model").symlink_to(tiny_model)
    serve = "" if place == "generator" else 'serve = "127.0.0.1:0"'
    text = RUN.format(serve=serve, steps=STEPS, stops=json.dumps(list("abcdefghijklmn")))
    for name in names:
        source, library, keys = WORLDS[name]
        (tmp_path / f"{name}.py").write_text(source)
        python = {"python": library_python(library)} if library else {}
        text += environment(place, name, **keys, **python)
        if keys["kind"] == "verifiers":
            umbra(
                tmp_path, "make-task", f"verifiers:{name}", "--out", name, "--heldout", "1",
                "--python", python["python"],
            )  # fmt: skip
            (tmp_path / name / "prompts.jsonl").rename(tmp_path / f"{name}.jsonl")
        else:
            rows = [{"prompt": f"play {n}", "target": n} for n in range(8)]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(text)
    if place == "generator":
        umbra(tmp_path, "up", "run.toml")
    else:
        up_with_runner(tmp_path, len(names))
    (folder,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    trained = {
        name: sum(row.get(f"environment/{name}/samples", 0.0) for row in steps) for name in names
    }
    assert sum(trained.values()) == STEPS * 20
    assert min(trained.values()) > 0, trained
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mismatch_k3_on_policy"] < 1e-5
    assert summary["ledger"]["balance"] == 0
    assert summary["ledger"]["trained"] == STEPS * 20
    assert not summary["ledger"]["ended"].get("failed"), summary["ledger"]


def up_with_runner(folder: Path, endpoints: int) -> None:
    """`umbra up`, and a runner for all endpoints of its generator."""
    run = subprocess.Popen([*UMBRA, "up", "run.toml"], cwd=folder)
    try:
        until(
            lambda: len(urls_of(folder / "runs")) == endpoints,
            lambda: urls_of(folder / "runs"),
            limit_s=seconds(900),
        )
        urls = [part for url in urls_of(folder / "runs") for part in ("--generator", url)]
        runner = subprocess.Popen([*UMBRA, "run-agents", "--config", "run.toml", *urls], cwd=folder)
        assert run.wait(seconds(2400)) == 0
        runner.terminate()
        assert runner.wait(seconds(60)) == 0
    finally:
        run.kill()
        run.wait()


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
