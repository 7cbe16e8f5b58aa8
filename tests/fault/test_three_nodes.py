"""A planned run on three nodes made of network namespaces; one is cut off in the middle.

Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

import json
from pathlib import Path

import pytest
from fakes.machines import check_ledger, run_planned, sort_task
from fakes.slowness import limit

NODES = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3"}
STEPS = 70
# The demo's reward, at a pace that lets no machine be done before the node is back.
REWARD = """
import time

def score(prompt, completion, row):
    time.sleep(0.015)
    return float(completion.strip() == row["answer"])
"""


@pytest.mark.timeout(360)
def test_a_node_is_cut_off_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "paced.py").write_text(REWARD, encoding="utf-8")
    sort_task(tmp_path)
    settings = [f"run.steps={STEPS}", "run.broker_grace_s=120", "environment.kind=reward"]
    settings += ["environment.reward=paced:score"]
    cluster, cut = 'ratios = [0.34, 0.66]\nbroker = "c"', {"host": "b", "steps": 5, "cut_s": 20.0}
    outcome = run_planned(tmp_path, cluster, NODES, settings, limit(300.0), cut)
    # Everyone was well before, nobody had to be started again, and everyone left in order.
    assert all(outcome["healthy"].values()), outcome
    assert not any(outcome["outsiders"].values()), "CURVE should be on"
    assert all(codes == [0] for codes in outcome["codes"].values()), outcome
    volumes = tmp_path / "plan" / "volumes"
    check_ledger(volumes / "c" / "results" / "run" / "buffer.json", STEPS * 8 * 32)
    # The one that was cut off was missed, came back, and got new weights afterwards.
    lines = (volumes / "b" / "results" / "run" / "metrics.jsonl").read_text().splitlines()
    pushed = [row for row in map(json.loads, lines) if row["kind"] == "push"]
    assert {row["receiver"] for row in pushed} == {"generator-b-0"}
    assert max(row["version"] for row in pushed) > STEPS // 2
