"""Whole runs by `umbra up` whose trainer has two ranks: hub, buffer and generator for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.slowness import seconds
from fakes.waiting import until
from safetensors.torch import load_file

from umbra.proto.records import Trajectory
from umbra.services.buffer.store import LmdbStore
from umbra.services.config.loader import load_config
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.update import PolicyUpdate

DEADLINE_S = seconds(150.0)
RANKS = ("--set", "trainer.ranks=2")


def start(project: Path, *settings: str) -> subprocess.Popen[str]:
    """`umbra up` in a project folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "umbra", "up", "run.toml", *RANKS, *settings],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def run(project: Path, *settings: str) -> Path:
    """A run from beginning to end; its folder."""
    process = start(project, *settings)
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    (folder,) = (project / "runs").iterdir()
    return folder


def steps(folder: Path) -> list[dict[str, Any]]:
    """The rows of the trainer's steps."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if row["kind"] == "step"]


def pushes(folder: Path) -> list[dict[str, Any]]:
    """The rows of the hub's pushes."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "push"]


def batch(folder: Path, step: int) -> list[Trajectory]:
    """What was trained on in `step`, out of the run's store."""
    with closing(LmdbStore(folder / "store")) as store:
        groups = msgspec.msgpack.decode(store.get(f"b/{step}"))["groups"]
        keys = [f"t/{sample['sample_id']}" for group in groups for sample in group["samples"]]
        return [msgspec.msgpack.decode(one, type=Trajectory) for one in store.get_all(keys)]


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_two_ranks_learn_what_one_would_have_learned(project: Path) -> None:
    """1. A run with two ranks. 2. One process learns from the very same batches. Result: equal."""
    # Plain descent: Adam would turn rounding in near-zero gradients into full steps.
    descent = ("--set", "trainer.optimizer=sgd", "--set", "trainer.learning_rate=0.1")
    folder = run(project, "--set", "run.steps=5", *descent)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mismatch_k3_on_policy"] < 1e-6, "the generators have the ranks' weights"
    assert summary["ledger"]["balance"] == 0
    assert set(summary["seconds"]["services"]) == {
        "buffer", "weight-hub", "trainer", "generator-0",
    }  # fmt: skip
    torch.set_num_threads(1)
    config = load_config(folder / "config.json", environ={})
    assert config.trainer.ranks == 2
    model, _ = load_policy(project / "model")
    learner = Learner(model, config.trainer, config.run.steps)
    update = PolicyUpdate(config, learner)
    rows = steps(folder)
    assert len(rows) == 5
    for version, row in enumerate(rows):
        trajectories = batch(folder, version + 1)
        assert len(trajectories) == 16
        alone = update(make_batch(trajectories, model.config.vocab_size), version, lambda: True)
        assert alone is not None
        for key in ("loss", "grad_norm", "entropy", "clip_fraction", "mismatch/k1", "ess"):
            assert row[key] == pytest.approx(alone[key], rel=1e-3, abs=1e-5), (version, key)
    exported = load_file(folder / "model" / "model.safetensors")
    for name, tensor in learner.weights().items():
        torch.testing.assert_close(exported[name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.e2e
@pytest.mark.timeout(180)
# In the suite a version that is an adapter alone is that of test_an_adapter_survives_every_restart,
# and what is merged that of the case "lora" in test_trainer_ranks.py.
@pytest.mark.real
@pytest.mark.parametrize("published", ["merged", "adapter"])
def test_an_adapter_is_trained_and_goes_out(project: Path, published: str) -> None:
    """Generators get it merged or by itself; the model at the end has it merged."""
    lora = ("--set", "trainer.lora_rank=2", "--set", "trainer.learning_rate=0.02")
    publish = ("--set", f"trainer.lora_publish={published}")
    folder = run(project, *lora, *publish, "--set", "run.steps=4")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mismatch_k3_on_policy"] < 1e-6, "what generates is what is trained"
    assert summary["ledger"]["balance"] == 0
    whole = sum(p.numel() for p in load_policy(project / "model")[0].parameters())
    sent = {row["bytes"] for row in pushes(folder)}
    assert len(sent) == 1
    assert (sent.pop() < 4 * whole / 2) == (published == "adapter")
    before = load_file(project / "model" / "model.safetensors")
    after = load_file(folder / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        change = (tensor - before[name]).double()
        if name.endswith("proj.weight"):
            sizes = torch.linalg.svdvals(change)
            assert sizes[1] > 1e-4, name
            assert sizes[2:].max() < 1e-5, f"{name}: only an update of rank 2 was trained"
        else:
            assert not change.any(), name


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_what_the_engine_chose_is_replayed(project: Path) -> None:
    """A mixture of experts: the generator tells its routing, and two ranks replay it."""
    model = ARCHITECTURES["qwen3-moe"].write(project / "mixture")
    settings = ("trainer.router_replay=true", f"model.path={model}", "run.steps=3")
    folder = run(project, *(word for one in settings for word in ("--set", one)))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["mismatch_k3_on_policy"] < 1e-6
    assert summary["ledger"]["balance"] == 0
    for step, row in enumerate(steps(folder), 1):
        assert 0 <= row["experts/rerouted"] < 0.5
        assert 1 <= row["experts/load/mean"] <= 4
        for made in batch(folder, step):
            assert made.routing is not None
            assert (made.routing.layers, made.routing.choices, made.routing.experts) == (2, 2, 4)
            tokens = len(made.prompt_ids) // 4 + made.response_tokens
            assert len(made.routing.chosen) == 4 * (tokens - 1)
    before, after = (load_file(at / "model.safetensors") for at in (model, folder / "model"))
    assert before.keys() == after.keys()


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.real  # in the suite a host of two is lost in a run (test_trainer_hosts_run.py)
@pytest.mark.timeout(180)
def test_a_killed_rank_ends_the_trainer_which_is_started_again(project: Path) -> None:
    """1. Two ranks train. 2. The second is killed. Result: both start again, the run ends well."""
    process = start(project, "--set", "run.steps=30")
    try:
        runs = lambda: list(project.glob("runs/*"))  # noqa: E731
        until(
            lambda: process.poll() is not None or (runs() and len(steps(runs()[0])) >= 2),
            "two steps",
            limit_s=DEADLINE_S,
        )
        assert process.poll() is None
        folders = runs()
        os.kill(second_rank(folders[0]), signal.SIGKILL)
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    log = (folders[0] / "logs" / "trainer.log").read_text()
    assert "trainer rank 1 ended unexpectedly (killed by SIGKILL)" in log
    summary = json.loads((folders[0] / "summary.json").read_text())
    assert summary["restarts"] == {"trainer": 1}
    assert summary["ledger"]["trained"] == 30 * 16


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(300)
def test_an_adapter_survives_every_restart(project: Path) -> None:
    """1. A run publishes an adapter alone. 2. Generator, hub and trainer are killed, one by one.

    Result: each is started again. The generator joins late and gets the newest version on its own
    base, the hub takes over the arena, and the trainer goes on from its checkpoint.
    """
    keys = ("trainer.lora_rank=2", "trainer.learning_rate=0.02", "trainer.lora_publish=adapter")
    more = ("run.steps=24", "checkpoint.every=1", "trainer.ranks=1")
    process = start(project, *(word for key in (*keys, *more) for word in ("--set", key)))
    killed: list[str] = []
    try:
        runs = lambda: list(project.glob("runs/*"))  # noqa: E731
        for name in ("generator-0", "weight-hub", "trainer"):
            done = len(steps(runs()[0])) if runs() else 0
            until(
                lambda done=done: (
                    process.poll() is not None or (runs() and len(steps(runs()[0])) >= done + 2)
                ),
                "two steps",
                limit_s=DEADLINE_S,
            )
            assert process.poll() is None
            os.kill(member(runs()[0], name.encode()), signal.SIGKILL)
            killed.append(name)
        output, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    summary = json.loads((runs()[0] / "summary.json").read_text())
    assert summary["restarts"] == dict.fromkeys(killed, 1)
    assert summary["ledger"]["trained"] == 24 * 16
    assert summary["ledger"]["balance"] == 0
    assert summary["mismatch_k3_on_policy"] < 1e-6


def second_rank(folder: Path) -> int:
    """The process of rank 1 of the run in `folder`."""
    return member(folder, b"trainer-rank1")


def member(folder: Path, name: bytes) -> int:
    """The process of that name of the run in `folder`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if name in words and bytes(folder) in words:
            return int(path.parent.name)
    raise AssertionError(f"no process {name!r}")
