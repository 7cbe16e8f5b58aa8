"""Whole runs with a trainer on two hosts of network namespaces; hosts are lost, with their memory.

Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.commands import UMBRA, call
from fakes.slowness import limit, seconds
from fault.test_three_nodes import in_spaces, why_not
from safetensors.torch import load_file

from umbra.proto.messages import Status
from umbra.services.trainer.checkpoints.folder import export_checkpoint

LIMIT_S = limit(250.0)
LONG_S = limit(600.0)  # for what happens to four hosts
# A random model earns something, and different things.
REWARD = """
def score(prompt, completion, row):
    return len(set(completion)) / 12
"""
RUN = """
[run]
name = "hosts"
broker_grace_s = 1200
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
rank_timeout_s = RANK_TIMEOUT_S
[checkpoint]
every = 2
"""


def run(folder: Path, steps: int, settings: dict[str, Any]) -> dict[str, list[int]]:
    """A run of so many steps, in `folder`; exit codes by process."""
    if reason := why_not():
        pytest.skip(reason)
    for command in (
        ("make-model", "base", "--hidden", "32", "--ff", "64"),
        ("make-task", "sort", "--out", "sort", "--prompts", "64", "--heldout", "8", "--demos", "1"),
    ):
        call([*UMBRA, *command], cwd=folder, check=True, quiet_s=120)
    text = RUN.replace("FOLDER", str(folder)).replace("[run]", f"[run]\nsteps = {steps}")
    text = text.replace("RANK_TIMEOUT_S", f"{seconds(10.0):g}")
    (folder / "varied.py").write_text(REWARD, encoding="utf-8")
    (folder / "run.toml").write_text(text, encoding="utf-8")
    return json.loads(in_spaces("programs.hosts_run", folder, folder, json.dumps(settings)))


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
    lines = (host / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.timeout(300)
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


@pytest.mark.real
@pytest.mark.timeout(650)
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
