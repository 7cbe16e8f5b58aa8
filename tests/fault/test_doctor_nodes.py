"""`umbra doctor` on two nodes: a port is dropped on the way, and one clock is wrong.

Needs `unshare`, `ip`, `iptables` and the right to make namespaces; skipped with the reason
otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fakes.clusters import cluster, run_config
from fakes.slowness import seconds
from msgspec.structs import replace
from test_three_nodes import SPACES, why_not

from umbra.deploy.cluster.bundle import Bundle
from umbra.deploy.cluster.plan import make_plan

PROGRAM = Path(__file__).parents[1] / "programs" / "doctor_nodes.py"
LISTEN_S = min(60.0, seconds(10.0))
DROPPED = 5557  # the buffer's events
AHEAD_S = 30.0
HOSTS = (("alpha", "10.78.0.1"), ("beta", "10.78.0.2"))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both said: buffer and trainer are on alpha, a relay and a generator on beta."""
    if reason := why_not() or ("" if shutil.which("iptables") else "iptables is not installed"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("plan")
    file = cluster(0, 0)
    for at, (name, address) in enumerate(HOSTS):
        file.nodes[at] = replace(file.nodes[at], name=name, address=address)
    bundle = Bundle(make_plan(file, run_config(), "run-1"), "", folder, None)
    bundle.write(bundle.plan_file())
    settings = {"dropped": DROPPED, "ahead_s": AHEAD_S, "for_s": LISTEN_S}
    done = subprocess.run(
        [*SPACES, "--uts", sys.executable, str(PROGRAM), str(folder), json.dumps(settings)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROGRAM.parents[1]), *sys.path])},
        stdout=subprocess.PIPE,
        timeout=seconds(300.0),
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


def checks(told: dict[str, Any], node: str, name: str) -> dict[str, str]:
    """Results of a check by the fact that was told."""
    found = json.loads(told["said"][node])["checks"]
    return {one["fact"]: one["result"] for one in found if one["check"] == name}


@pytest.mark.fault
@pytest.mark.slow
def test_the_port_that_is_dropped_is_named_and_the_others_are_reached(told: dict[str, Any]) -> None:
    assert checks(told, "beta", "beta to alpha") == {
        "10.78.0.1:5555 (buffer)": "ok",
        "10.78.0.1:5556 (buffer)": "ok",
        f"10.78.0.1:{DROPPED} (buffer): timed out": "problem",
        "10.78.0.1:5559 (weight-hub)": "ok",
        "10.78.0.1:5560 (weight-hub)": "ok",
        "10.78.0.1:5563 (weight-hub)": "ok",
    }
    assert checks(told, "alpha", "network") == {"alpha has to reach no other node": "ok"}
    assert told["codes"]["beta"] == 1


@pytest.mark.fault
@pytest.mark.slow
def test_clocks_and_versions_of_the_other_node(told: dict[str, Any]) -> None:
    ((fact, result),) = checks(told, "beta", "clock of alpha").items()
    assert result == "warning"
    assert abs(float(fact.split()[0]) + AHEAD_S) < AHEAD_S / 2
    assert checks(told, "beta", "versions") == {"the same on beta, alpha": "ok"}
