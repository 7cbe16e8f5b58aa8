"""A whole run with a trainer on two hosts of network namespaces; one is lost, with its memory.

Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from fakes.slowness import seconds
from fault.test_three_nodes import SPACES, UMBRA, why_not
from safetensors.torch import load_file

from umbra.proto.messages import Status
from umbra.services.trainer.checkpoints.export import export_checkpoint

TESTS = Path(__file__).parents[1]
LIMIT_S = seconds(250.0)
STEPS = 12
RUN = f"""
[run]
name = "hosts"
steps = {STEPS}
broker_grace_s = 120
[model]
path = "FOLDER/base"
[data]
prompts = "FOLDER/sort/prompts.jsonl"
[environment]
kind = "exact"
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
rendezvous_timeout_s = {LIMIT_S}
rank_timeout_s = {seconds(10.0)}
[checkpoint]
every = 2
"""


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_trainer_host_is_lost_and_comes_back(tmp_path: Path) -> None:
    """1. A run begins. 2. All of the second trainer host is killed, and its memory is gone.

    Result: the trainer starts again on both, the run ends, and every sample is accounted for.
    """
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "run.toml").write_text(RUN.replace("FOLDER", str(tmp_path)), encoding="utf-8")
    for command in (
        ("make-model", "base", "--hidden", "32", "--ff", "64"),
        ("make-task", "sort", "--out", "sort", "--prompts", "64", "--heldout", "8", "--demos", "1"),
    ):
        subprocess.run([*UMBRA, *command], cwd=tmp_path, check=True, timeout=seconds(120))
    settings = json.dumps({"after_step": 5, "limit_s": LIMIT_S})
    done = subprocess.run(
        [*SPACES, "--uts", sys.executable, "-m", "programs.hosts_run", tmp_path, settings],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    assert codes["alpha/trainer"][-1] == codes["beta/trainer"][-1] == 0, codes
    assert codes["alpha/trainer"][0] == 5, "it lost the other host"
    assert codes["alpha/buffer"] == codes["gamma/generator"] == [0], (
        "nobody else had to start again"
    )
    alpha, beta = tmp_path / "alpha" / "run", tmp_path / "beta" / "run"
    assert "node 1 (beta)" in (tmp_path / "alpha-trainer.log").read_text()
    status = msgspec.json.decode((alpha / "buffer.json").read_bytes(), type=Status)
    assert status.ledger.balance == 0
    assert status.ledger.trained == STEPS * 16
    assert sum(status.ledger.in_flight.values()) == 0
    # Each host has its files alone; together they are the model that rank 0 has written.
    last = f"step-{STEPS}"
    assert not list(beta.glob("checkpoints/step-*"))
    (alpha / "checkpoints" / "node-1").symlink_to(beta / "checkpoints" / "node-1")
    exported = export_checkpoint(
        alpha / "checkpoints" / last, tmp_path / "hf", str(tmp_path / "base")
    )
    for name, tensor in load_file(alpha / "model" / "model.safetensors").items():
        assert load_file(exported / "model.safetensors")[name].equal(tensor)
