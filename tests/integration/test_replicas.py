"""`generator.replicas` and `generator.engine = "replay"`: a whole run, and what is refused."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import seconds
from integration.test_up import UpProcess, up

from umbra.proto.errors import UsageError
from umbra.services.config import GeneratorConfig
from umbra.services.generator.replicas import share_gpus

__all__ = ["up"]  # a fixture

REPLAY = {"step_s": 0.02, "token_s": 1e-5, "pause_s": 0.01, "lengths": [2, 5, 12, 40]}


def replicas(process: UpProcess) -> list[int]:
    """The processes of generator-0's replicas, by number."""
    found: dict[bytes, int] = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if bytes(process.run_dir) in words and b"generator" in words:
            found[words[words.index(b"--name") + 1]] = int(path.parent.name)
    return [found[name] for name in sorted(found) if name.startswith(b"generator-0-")]


def spans(process: UpProcess) -> list[dict[str, Any]]:
    """What the generators have decoded so far."""
    return [row for row in process.rows() if row.get("name") == "decode"]


@pytest.mark.e2e
@pytest.mark.fault
@pytest.mark.timeout(180)
def test_a_run_on_two_engines_without_a_model_one_of_which_is_killed(
    project: Path, up: Callable[..., UpProcess]
) -> None:
    """Scenario: a real trainer and real weights. Result: the group ends, and is started again."""
    (project / "replay.json").write_text(json.dumps(REPLAY))
    process = up(
        "generator.engine=replay",
        "generator.replay=replay.json",
        "generator.replicas=2",
        "generator.slots=4",
        "run.steps=30",
    )
    process.broker()
    both = {"generator-0-0", "generator-0-1"}
    process.until(lambda: {row["service"] for row in spans(process)} == both, "both decode")
    os.kill(replicas(process)[1], signal.SIGKILL)
    summary = process.finish()
    assert process.popen.returncode == 0, process.lines
    assert summary["restarts"] == {"generator-0": 1}
    assert (summary["steps"], summary["ledger"]["balance"]) == (30, 0)
    assert max(n for row in spans(process) for n in row["lengths"]) <= 12  # sampling.max_tokens
    log = (process.run_dir / "logs" / "generator-0.log").read_text()
    assert "umbra: error: replica generator-0-1 ended unexpectedly (killed by SIGKILL)" in log


def test_what_a_replica_cannot_do_is_said_by_the_group(tmp_path: Path) -> None:
    """Scenario: no model. Result: the replica's own sentence and exit code, and no process left."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "umbra", "generator", "--replicas", "2", "--device", "cpu"),
            *("--broker", "tcp://127.0.0.1:9"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=seconds(50),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("umbra: error: replica generator-")
    assert (
        "ended unexpectedly (exit code 2): model.path is empty: name a Hugging Face model directory"
        in last
    )


def test_gpus_are_shared_evenly() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "3,1,GPU-ab,0,7"}

    def shares(count: int, device: str = "auto") -> list[str]:
        config = GeneratorConfig(replicas=count, device=device)
        return [share["CUDA_VISIBLE_DEVICES"] for share in share_gpus(config, environ)]

    assert shares(2) == ["3,1", "GPU-ab,0"]
    assert shares(5, "cuda") == ["3", "1", "GPU-ab", "0", "7"]
    with pytest.raises(UsageError, match="6 is more than the 5 GPUs"):
        shares(6)
    with pytest.raises(UsageError, match=r"cannot share generator\.device = cuda:1"):
        shares(2, "cuda:1")
    assert share_gpus(GeneratorConfig(replicas=3, device="cpu"), environ) == [{}, {}, {}]
    assert share_gpus(GeneratorConfig(replicas=2), {"CUDA_VISIBLE_DEVICES": ""}) == [{}, {}]
    with pytest.raises(UsageError, match="more than the 0 GPUs"):
        share_gpus(GeneratorConfig(replicas=2, device="cuda"), {"CUDA_VISIBLE_DEVICES": ""})
