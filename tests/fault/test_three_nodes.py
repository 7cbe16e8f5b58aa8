"""A planned run on three nodes made of network namespaces; one is cut off in the middle.

Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.slowness import seconds

from umbra.proto.messages import Status

UMBRA = (sys.executable, "-m", "umbra")
PROGRAM = Path(__file__).parents[1] / "programs" / "three_nodes.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
SPACES = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--kill-child", "--fork")
NODES = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3"}
CUT_S = 20.0
LIMIT_S = seconds(300.0)
STEPS = 70
# The demo's reward, at a pace that lets no machine be done before the node is back.
REWARD = """
import time

def score(prompt, completion, row):
    time.sleep(0.015)
    return float(completion.strip() == row["answer"])
"""
# The namespaces map no user but ours, to whom the keys must belong.
CLUSTER = f"""
[cluster]
user = "{os.geteuid()}:{os.getegid()}"
groups = ["train", "generate"]
ratios = [0.34, 0.66]
broker = "c"
"""


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    inner = "unshare --net --mount mount -t tmpfs tmpfs /srv && ip link add x type bridge"
    tried = subprocess.run(
        [*SPACES, "sh", "-c", inner],
        capture_output=True,
        text=True,
        timeout=seconds(30),
        check=False,
    )
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """What `umbra plan` makes of the demo and three nodes; the base model is left random."""
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(EXAMPLES / "sort.toml", project / "run.toml")
    (project / "paced.py").write_text(REWARD, encoding="utf-8")
    nodes = [f'[[nodes]]\nname = "{n}"\naddress = "{a}"\n' for n, a in NODES.items()]
    (project / "cluster.toml").write_text(CLUSTER + "".join(nodes), encoding="utf-8")
    sizes = ("--prompts", "512", "--heldout", "64", "--demos", "1")
    overrides = (
        f"run.steps={STEPS}",
        "run.broker_grace_s=120",
        "environment.kind=reward",
        "environment.reward=paced:score",
    )
    for command in (
        ("make-model", "sort/base"),
        ("make-task", "sort", "--out", "sort", *sizes),
        (
            *("plan", "cluster.toml", "run.toml", "--out", "plan", "--run-id", "three"),
            *(part for override in overrides for part in ("--set", override)),
        ),
    ):
        subprocess.run([*UMBRA, *command], cwd=project, check=True, timeout=seconds(120))
    return project / "plan"


def rows(plan: Path, node: str, kind: str) -> list[dict[str, Any]]:
    """What was measured on `node`."""
    path = plan / "volumes" / node / "results" / "three" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_node_is_cut_off_and_comes_back(plan: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    settings = {"nodes": NODES, "cut": "b", "after_step": 5, "cut_s": CUT_S, "limit_s": LIMIT_S}
    done = subprocess.run(
        [*SPACES, sys.executable, PROGRAM, plan, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S + 30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    # Everyone was well before, nobody had to be started again, and everyone left in order.
    assert all(outcome["healthy"].values()), outcome
    assert not any(outcome["strangers_answered"].values()), "CURVE should be on"
    assert all(codes == [0] for codes in outcome["codes"].values()), outcome
    assert outcome["steps_while_cut"] > 0, "the other generator should have gone on"
    results = plan / "volumes" / "c" / "results" / "three" / "buffer.json"
    status = msgspec.json.decode(results.read_bytes(), type=Status)
    assert status.ledger.balance == 0
    assert status.ledger.trained == STEPS * 8 * 32
    assert sum(status.ledger.in_flight.values()) == 0
    # The one that was cut off was missed, came back, and got new weights afterwards.
    pushed = rows(plan, "b", "push")
    assert {row["receiver"] for row in pushed} == {"generator-b-0"}
    assert max(row["version"] for row in pushed) > STEPS // 2
