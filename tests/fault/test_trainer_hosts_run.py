"""Whole runs with a trainer on two hosts of network namespaces; hosts are lost, with their memory.

Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.slowness import seconds
from fault.test_three_nodes import SPACES, UMBRA, why_not
from safetensors.torch import load_file

from umbra.proto.messages import Status
from umbra.services.trainer.checkpoints.export import export_checkpoint

TESTS = Path(__file__).parents[1]
LIMIT_S = seconds(250.0)
LONG_S = seconds(600.0)  # for what happens to four hosts
# A random model earns something, and different things.
REWARD = """
def score(prompt, completion, row):
    return len(set(completion)) / 12
"""
RUN = f"""
[run]
name = "hosts"
broker_grace_s = {seconds(120.0)}
[model]
path = "FOLDER/base"
[data]
prompts = "FOLDER/sort/prompts.jsonl"
[environment]
kind = "reward"
reward = "varied:score"
[sampling]
max_tokens = 12
[buffer]
group_size = 4
batch_groups = 4
run_ahead = 1
max_staleness = 3
[generator]
device = "cpu"
threads = 1
slots = 32
max_context = 64
[trainer]
device = "cpu"
threads = 1
pack_tokens = 64
ranks = 4
nodes = 2
rendezvous = "10.78.0.1:29500"
rank_timeout_s = {seconds(10.0)}
[checkpoint]
every = 2
"""


def run(
    folder: Path, steps: int, settings: dict[str, Any], changes: Mapping[str, str] | None = None
) -> dict[str, list[int]]:
    """A run of so many steps, in `folder`; exit codes by process. `changes` are those of `RUN`."""
    if reason := why_not():
        pytest.skip(reason)
    for command in (
        ("make-model", "base", "--hidden", "32", "--ff", "64"),
        ("make-task", "sort", "--out", "sort", "--prompts", "64", "--heldout", "8", "--demos", "1"),
    ):
        subprocess.run([*UMBRA, *command], cwd=folder, check=True, timeout=seconds(120))
    text = RUN.replace("FOLDER", str(folder)).replace("[run]", f"[run]\nsteps = {steps}")
    for before, after in (changes or {}).items():
        text = text.replace(before, after)
    (folder / "varied.py").write_text(REWARD, encoding="utf-8")
    (folder / "run.toml").write_text(text, encoding="utf-8")
    program = (sys.executable, "-m", "programs.hosts_run")
    done = subprocess.run(
        [*SPACES, "--uts", *program, folder, json.dumps(settings)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(folder), *sys.path])},
        capture_output=True,
        text=True,
        timeout=settings["limit_s"] + 30,
        check=False,
    )
    logs = "".join(f"\n== {p.name}\n{p.read_text()[-1500:]}" for p in sorted(folder.glob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    return json.loads(done.stdout)


def check_ledger(folder: Path, steps: int) -> None:
    """All samples of all steps, each trained once, and none unaccounted for."""
    made = folder / "alpha" / "run" / "buffer.json"
    ledger = msgspec.json.decode(made.read_bytes(), type=Status).ledger
    assert ledger.balance == 0
    assert ledger.trained == steps * 16
    assert sum(ledger.in_flight.values()) == 0


def check_export(folder: Path, steps: int) -> None:
    """Each trainer host has its own files alone; together they are the model that rank 0 wrote."""
    alpha, beta = folder / "alpha" / "run", folder / "beta" / "run"
    assert not list(beta.glob("checkpoints/step-*"))
    (alpha / "checkpoints" / "node-1").symlink_to(beta / "checkpoints" / "node-1")
    last = alpha / "checkpoints" / f"step-{steps}"
    exported = load_file(
        export_checkpoint(last, folder / "hf", str(folder / "base")) / "model.safetensors"
    )
    for name, tensor in load_file(alpha / "model" / "model.safetensors").items():
        assert exported[name].equal(tensor)


def metrics(host: Path, kind: str) -> list[dict[str, Any]]:
    """What was measured on a host."""
    lines = (host / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_trainer_host_is_lost_and_comes_back(tmp_path: Path) -> None:
    """1. A run begins. 2. All of the second trainer host is killed, and its memory is gone.

    Result: the trainer starts again on both, the run ends, and every sample is accounted for.
    """
    steps = 12
    loss = {"host": "beta", "steps": 5, "back": {"ended": "alpha/trainer"}}
    hosts = {"hosts": ["alpha", "beta", "gamma"], "relays": []}
    codes = run(tmp_path, steps, {**hosts, "losses": [loss], "limit_s": LIMIT_S})
    assert codes["alpha/trainer"] == [5, 0], "it lost the other host"
    assert codes["beta/trainer"] == [0]
    assert codes["alpha/buffer"] == codes["gamma/generator"] == [0], (
        "nobody else had to start again"
    )
    assert "node 1 (beta)" in (tmp_path / "alpha-trainer.log").read_text()
    check_ledger(tmp_path, steps)
    check_export(tmp_path, steps)


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(LIMIT_S + 60)
def test_two_trainer_hosts_publish_an_adapter_alone(tmp_path: Path) -> None:
    """1. A run whose versions are factors, of three rows over four ranks. 2. A host is lost.

    Result: as without an adapter; and what generates is what is trained, before and after.
    """
    steps = 8
    loss = {"host": "beta", "steps": 4, "back": {"ended": "alpha/trainer"}}
    hosts = {"hosts": ["alpha", "beta", "gamma"], "relays": []}
    adapter = 'lora_rank = 3\nlora_publish = "adapter"\nlearning_rate = 0.02\n'
    changes = {"[trainer]\n": f"[trainer]\n{adapter}", "run_ahead = 1": "run_ahead = 0"}
    settings = {**hosts, "losses": [loss], "limit_s": LIMIT_S}
    codes = run(tmp_path, steps, settings, changes)
    assert codes["alpha/trainer"] == [5, 0]
    check_ledger(tmp_path, steps)
    check_export(tmp_path, steps)
    rows = metrics(tmp_path / "alpha", "step")
    assert rows[-1]["step"] == steps
    assert min(row["grad_norm"] for row in rows) > 0
    assert max(row["mismatch/k3_on_policy"] for row in rows) < 1e-6
    weights = load_file(tmp_path / "base" / "model.safetensors").values()
    whole = sum(4 * tensor.numel() for tensor in weights)
    assert {row["bytes"] < whole / 2 for row in metrics(tmp_path / "alpha", "push")} == {True}


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(LONG_S + 60)
def test_each_of_four_hosts_is_lost(tmp_path: Path) -> None:
    """1. The second trainer host is lost and comes back. 2. So is a generator host with a relay.

    3. So is the first trainer host, with buffer and weight hub. 4. The other generator host is lost
    for good.

    Result: the run ends after its steps, and every sample is accounted for.
    """
    steps = 24
    losses = [
        {"host": "beta", "steps": 4, "back": {"ended": "alpha/trainer"}},
        {"host": "gamma", "steps": 3, "back": {"steps": 2}},
        {"host": "alpha", "steps": 4, "back": {"ended": "beta/trainer"}},
        {"host": "delta", "steps": 3},
    ]
    hosts = {"hosts": ["alpha", "beta", "gamma", "delta"], "relays": ["gamma"]}
    codes = run(tmp_path, steps, {**hosts, "losses": losses, "limit_s": LONG_S})
    assert codes["alpha/trainer"] == [5, 0], "it lost beta"
    assert codes["beta/trainer"] == [5, 0], "it lost alpha"
    assert codes["delta/generator"] == [], "it was never seen again"
    others = ("alpha/buffer", "alpha/weight-hub", "beta/part", "gamma/relay", "gamma/generator")
    assert {name: codes[name] for name in others} == {name: [0] for name in others}
    check_ledger(tmp_path, steps)
    check_export(tmp_path, steps)
    pushed = metrics(tmp_path / "gamma", "push")
    assert {row["plane"] for row in pushed} == {"shm"}, "the relay served its generator"
    assert max(row["version"] for row in pushed) >= steps - 1, "it served to the end"
