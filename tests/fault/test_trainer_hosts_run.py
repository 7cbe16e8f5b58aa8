"""A trainer on two hosts of network namespaces: hosts are lost with their memory, or cut off.

Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes.machines import check_ledger, needs_hosts, on_hosts, run_planned
from fakes.slowness import limit, seconds
from programs.network import ADDRESSES
from safetensors.torch import load_file

from umbra.services.trainer.checkpoints.folder import export_checkpoint

HOSTS = ("alpha", "beta", "gamma", "delta")


def run(
    folder: Path, steps: int, ratios: list[float], limit_s: float, *events: dict[str, Any]
) -> dict[str, list[int]]:
    """A run of so many steps, all of whose samples are trained; exit codes by process."""
    file = folder / "run.toml"
    # Nobody is missed so soon here.
    file.write_text(re.sub(r"(lease|dead_after)_s = .*\n", "", file.read_text()))
    settings = [
        f"run.steps={steps}", "run.broker_grace_s=1200", "buffer.run_ahead=1",
        "buffer.max_staleness=3", "trainer.pack_tokens=64", "trainer.ranks=4", "trainer.nodes=2",
        f"trainer.rank_timeout_s={seconds(10.0):g}", "checkpoint.every=2",
    ]  # fmt: skip
    nodes = {name: ADDRESSES[name] for name in HOSTS[: 3 if len(events) == 1 else 4]}
    outcome = run_planned(folder, f"ratios = {ratios}", nodes, settings, limit_s, *events)
    alpha, beta = (folder / "plan" / "volumes" / name / "results/run" for name in HOSTS[:2])
    check_ledger(alpha / "buffer.json", steps * 16)
    # Each trainer host has its own files alone; together they are the model that rank 0 wrote.
    assert not list(beta.glob("checkpoints/step-*"))
    (alpha / "checkpoints" / "node-1").symlink_to(beta / "checkpoints" / "node-1")
    last = alpha / "checkpoints" / f"step-{steps}"
    hf = export_checkpoint(last, folder / "hf", str(folder / "model"))
    exported = load_file(hf / "model.safetensors")
    for name, tensor in load_file(alpha / "model" / "model.safetensors").items():
        assert exported[name].equal(tensor)
    return outcome["codes"]


@pytest.mark.timeout(300)
def test_a_trainer_host_is_lost_and_comes_back(project: Path) -> None:
    """1. A run begins. 2. All of the second trainer host is killed, and its memory is gone.

    Result: the trainer starts again on both, the run ends, and every sample is accounted for.
    """
    loss = {"host": "beta", "steps": 5, "back": {"ended": "trainer"}}
    codes = run(project, 12, [0.67, 0.33], limit(250.0), loss)
    assert codes["trainer"] == [5, 0], "it lost the other host"
    assert codes["trainer-beta"] == [0]
    for other in ("buffer", "generator-gamma-0"):
        assert codes[other] == [0], "nobody else had to start again"
    log = project / "plan" / "alpha" / "trainer.log"
    assert "node 1 (beta)" in log.read_text()


@pytest.mark.real
@pytest.mark.timeout(650)
def test_each_of_four_hosts_is_lost(project: Path) -> None:
    """1. The second trainer host is lost and comes back. 2. So is a generator host with a relay.

    3. So is the first trainer host, with buffer and weight hub. 4. The other generator host is lost
    for good.

    Result: the run ends after its steps, and every sample is accounted for.
    """
    steps = 24
    codes = run(
        project, steps, [0.5, 0.5], limit(600.0),
        {"host": "beta", "steps": 4, "back": {"ended": "trainer"}},
        {"host": "gamma", "steps": 3, "back": {"steps": 2}},
        {"host": "alpha", "steps": 4, "back": {"ended": "trainer-beta"}},
        {"host": "delta", "steps": 3},
    )  # fmt: skip
    assert codes["trainer"] == [5, 0], "it lost beta"
    assert codes["trainer-beta"] == [5, 0], "it lost alpha"
    assert codes["generator-delta-0"] == [], "it was never seen again"
    others = ("buffer", "weight-hub", "part-beta", "relay-gamma", "generator-gamma-0")
    assert {name: codes[name] for name in others} == {name: [0] for name in others}
    metrics = project / "plan" / "volumes" / "gamma" / "results" / "run" / "metrics.jsonl"
    pushed = [row for row in map(json.loads, metrics.open()) if row["kind"] == "push"]
    assert {row["plane"] for row in pushed} == {"shm"}, "the relay served its generator"
    assert max(row["version"] for row in pushed) >= steps - 1, "it served to the end"


PHASES = {  # of a push, in which a host is cut off
    "part": ("granted", "prepared", "staging", "received", "staged"),
    "hub": ("prepared", "staging", "received", "staged", "loaded"),
    "receiver": ("prepared", "staging", "received", "staged", "loaded"),
}
QUICK = (("part", "staging"), ("receiver", "received"))


@pytest.mark.parametrize(
    ("who", "phase"),
    [
        pytest.param(who, phase, marks=[] if (who, phase) in QUICK else pytest.mark.real)
        for who, phases in PHASES.items()
        for phase in phases
    ],
)
def test_versions_are_whole_whoever_is_cut_off(tmp_path: Path, who: str, phase: str) -> None:
    """1. A version is pushed. 2. In a phase of it a host is cut off. 3. It is connected again.

    Result: nobody hangs, receivers load whole versions only, and all of them load the last one; see
    `programs/cut_push.py`.
    """
    needs_hosts()
    on_hosts("cut_push", tmp_path, who, phase)
