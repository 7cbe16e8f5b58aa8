"""A planned run on three nodes made of network namespaces; one is cut off in the middle.

Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

import json
import os
from pathlib import Path

import pytest
from fakes.machines import check_ledger, needs_hosts, on_hosts, sort_task
from fakes.slowness import limit
from fakes.whole_runs import sets

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
CLUSTER = f"""
[cluster]
user = "{os.geteuid()}:{os.getegid()}"
groups = ["train", "generate"]
ratios = [0.34, 0.66]
broker = "c"
"""


@pytest.mark.timeout(360)
def test_a_node_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    needs_hosts()
    (tmp_path / "paced.py").write_text(REWARD, encoding="utf-8")
    nodes = [f'[[nodes]]\nname = "{n}"\naddress = "{a}"\n' for n, a in NODES.items()]
    settings = (f"run.steps={STEPS}", "run.broker_grace_s=120", "environment.kind=reward")
    plan = ("--run-id", "three", *sets(*settings, "environment.reward=paced:score"))
    sort_task(tmp_path, CLUSTER + "".join(nodes), *plan)
    cut = {"cut": "b", "after_step": 5, "cut_s": CUT_S}
    how = json.dumps({"nodes": NODES, "limit_s": LIMIT_S, **cut})
    outcome = json.loads(on_hosts("three_nodes", tmp_path / "plan", how))
    # Everyone was well before, nobody had to be started again, and everyone left in order.
    assert all(outcome["healthy"].values()), outcome
    assert not any(outcome["outsiders_answered"].values()), "CURVE should be on"
    assert all(codes == [0] for codes in outcome["codes"].values()), outcome
    volumes = tmp_path / "plan" / "volumes"
    check_ledger(volumes / "c" / "results" / "three" / "buffer.json", STEPS * 8 * 32)
    # The one that was cut off was missed, came back, and got new weights afterwards.
    lines = (volumes / "b" / "results" / "three" / "metrics.jsonl").read_text().splitlines()
    pushed = [row for row in map(json.loads, lines) if row["kind"] == "push"]
    assert {row["receiver"] for row in pushed} == {"generator-b-0"}
    assert max(row["version"] for row in pushed) > STEPS // 2
