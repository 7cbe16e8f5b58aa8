"""Two trainer hosts, made of network namespaces; one is cut off in a step, and both start again.

Needs `unshare` and `ip` and the right to make namespaces; skipped with the reason otherwise.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from fakes.rank_bench import make_batches, narrow_model, train
from fakes.slowness import seconds
from fault.test_three_nodes import SPACES, why_not
from integration.test_trainer_ranks import CASES
from safetensors.torch import load_file

from umbra.proto.errors import PeerLostError
from umbra.services.trainer.distributed.ranks import Ranks

TESTS = Path(__file__).parents[1]
LIMIT_S = seconds(150.0)
STEPS, SAVED = 3, 2
SAVING = {**CASES["adamw"], "checkpoints": "checkpoints", "hosts": [0, 1]}


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.real  # in the suite: a host that is killed in a whole run
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_host_is_cut_off_in_a_step(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """1. Two hosts train, and save. 2. The second is cut off. 3. Both are started again.

    Result: all ranks say whom they lost; then they go on from what each host has saved.
    """
    if reason := why_not():
        pytest.skip(reason)
    directory, batches = narrow_model(tmp_path_factory), make_batches(STEPS)
    first = {"half": {**SAVING, "until": SAVED}, "cut": CASES["adamw"]}
    (tmp_path / "cases.json").write_text(json.dumps(first))
    (tmp_path / "again.json").write_text(json.dumps({"again": SAVING}))
    (tmp_path / "batches.msgpack").write_bytes(msgspec.msgpack.encode(batches))
    done = subprocess.run(
        [*SPACES, "--uts", sys.executable, "-m", "programs.two_hosts", directory, tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    for rank, ended in enumerate(outcome["first"]):
        assert ended["code"] == PeerLostError.exit_code, ended["error"]
        assert f"trainer rank {rank} lost another rank, trainer rank" in ended["error"]
        if rank != 1:  # which may find rank 0 gone already
            lost = "rank 2 on node 1 (beta)" if rank == 0 else "rank 0 on node 0 (alpha)"
            assert re.search(re.escape(f"trainer {lost}"), ended["error"]), ended["error"]
    assert [ended["code"] for ended in outcome["second"]] == [0] * 4, outcome["second"]
    assert len(json.loads((tmp_path / "again.0.json").read_text())["rows"]) == STEPS - SAVED
    expected = train(directory, batches, Ranks(), **CASES["adamw"]).weights
    for name, tensor in load_file(tmp_path / "again.safetensors").items():
        torch.testing.assert_close(tensor, expected[name], atol=2e-5, rtol=1e-3)
