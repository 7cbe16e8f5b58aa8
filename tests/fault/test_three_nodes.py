"""A planned run on three nodes made of network namespaces; one is cut off in the middle.

Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fakes.commands import UMBRA, call
from fakes.slowness import limit

from umbra.proto.messages import Status

TESTS = Path(__file__).parents[1]
EXAMPLES = Path(__file__).parents[2] / "examples"
SPACES = (
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "--uts"),
    *("--kill-child", "--fork"),
)
NODES = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3"}
CUT_S = 20.0
LIMIT_S = limit(300.0)
STEPS = 70
# The demo's reward, at a pace that lets no machine be done before the node is back.
REWARD = """
import time

def score(prompt, completion, row):
    time.sleep(0.015)
    return float(completion.strip() == row["answer"])
"""
# The namespaces map no user but ours, to whom the keys must belong.
CLUSTER = """
[cluster]
user = "{user}"
groups = ["train", "generate"]
ratios = {ratios}
broker = "{broker}"
"""


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    inner = "unshare --net --mount mount -t tmpfs tmpfs /srv && ip link add x type bridge"
    tried = call([*SPACES, "sh", "-c", inner])
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def in_spaces(module: str, folder: Path, *words: str | Path) -> str:
    """Run one of our programs as root of namespaces of its own; return what it printed."""
    done = call(
        [*SPACES, sys.executable, "-m", module, *words],
        cwd=folder,
        env={"PYTHONPATH": os.pathsep.join([str(TESTS), str(folder), *sys.path])},
        quiet_s=700.0,  # it has a deadline of its own
    )
    logs = "".join(f"\n== {p.name}\n{p.read_text()[-2000:]}" for p in sorted(folder.rglob("*.log")))
    assert done.returncode == 0, done.stderr + logs
    return done.stdout


def planned(tmp_path: Path, ratios: list[float], steps: int, *more: str) -> Path:
    """Return a plan of the demo for three nodes; the base model is left random."""
    if reason := why_not():
        pytest.skip(reason)
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(EXAMPLES / "sort.toml", project / "run.toml")
    (project / "paced.py").write_text(REWARD, encoding="utf-8")
    nodes = [f'[[nodes]]\nname = "{n}"\naddress = "{a}"\n' for n, a in NODES.items()]
    user = f"{os.geteuid()}:{os.getegid()}"
    cluster = CLUSTER.format(user=user, ratios=ratios, broker="c") + "".join(nodes)
    (project / "cluster.toml").write_text(cluster, encoding="utf-8")
    sizes = ("--prompts", "512", "--heldout", "64", "--demos", "1")
    overrides = (
        f"run.steps={steps}",
        "run.broker_grace_s=120",
        "environment.kind=reward",
        "environment.reward=paced:score",
        *more,
    )
    settings = [part for override in overrides for part in ("--set", override)]
    make_plan = ("plan", "cluster.toml", "run.toml", "--out", "plan", *settings)

    def umbra(*arguments: str) -> None:
        call([*UMBRA, *arguments], cwd=project, check=True, quiet_s=120)

    umbra("make-model", "sort/base")
    umbra("make-task", "sort", "--out", "sort", *sizes)
    umbra(*make_plan, "--run-id", "three")
    return project / "plan"


def rows(plan: Path, node: str, kind: str) -> list[dict[str, Any]]:
    """Return the measurements on `node`."""
    path = plan / "volumes" / node / "results" / "three" / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def run(plan: Path, **happens: object) -> dict[str, Any]:
    """Run it on three nodes; after the fifth step something `happens`."""
    settings = {"nodes": NODES, "after_step": 5, "limit_s": LIMIT_S, **happens}
    return json.loads(in_spaces("programs.three_nodes", plan, plan, json.dumps(settings)))


def check_ledger(plan: Path, steps: int) -> None:
    """All samples of all steps, each trained once, and none unaccounted for."""
    results = plan / "volumes" / "c" / "results" / "three" / "buffer.json"
    status = msgspec.json.decode(results.read_bytes(), type=Status)
    assert status.ledger.balance == 0
    assert status.ledger.trained == steps * 8 * 32
    assert sum(status.ledger.in_flight.values()) == 0


@pytest.mark.timeout(360)
def test_a_node_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    plan = planned(tmp_path, [0.34, 0.66], STEPS)
    outcome = run(plan, cut="b", cut_s=CUT_S, goes_on=True)
    # Everyone was well before, nobody had to be started again, and everyone left in order.
    assert all(outcome["healthy"].values()), outcome
    assert not any(outcome["outsiders_answered"].values()), "CURVE should be on"
    assert all(codes == [0] for codes in outcome["codes"].values()), outcome
    assert outcome["steps_while_cut"] > 0, "the other generator should not have stopped"
    check_ledger(plan, STEPS)
    # The one that was cut off was missed, came back, and got new weights afterwards.
    pushed = rows(plan, "b", "push")
    assert {row["receiver"] for row in pushed} == {"generator-b-0"}
    assert max(row["version"] for row in pushed) > STEPS // 2
