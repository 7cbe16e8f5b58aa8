"""A whole run by `umbra up` whose generator is vLLM."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from fakes.installed import needs
from fakes.whole_runs import Up

from umbra.services.trainer.make_model import make_model

needs("vllm")
QUIET_S = 500.0  # vLLM starts twice
STEPS = 10  # so many that the last ones cannot be made without the core that is killed
VLLM = (
    'generator.engine="vllm"',
    "generator.engine_args.block_size=32",
    "sampling.max_tokens=24",
    "weight_hub.dtype=float32",
)


@pytest.fixture
def vllm_project(project: Path) -> Path:
    """The project folder, with a model whose heads vLLM can serve."""
    (project / "model").unlink()
    make_model(project / "model", hidden=64, heads=2, kv_heads=1, layers=1, ff=32)
    return project


def cores(project: Path) -> list[psutil.Process]:
    """vLLM's engine cores below the generators of this project's run."""
    generators = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "generator" in (process.info["cmdline"] or ())
        and any(str(project) in word for word in process.info["cmdline"])
    ]
    children = [child for one in generators for child in one.children()]
    return [child for child in children if "EngineCore" in " ".join(child.cmdline())]


@pytest.mark.timeout(500)
def test_a_run_on_vllm_whose_core_is_killed(
    vllm_project: Path,
    up: Up,
) -> None:
    """1. A run trains. 2. vLLM's core is killed. Result: named, restarted; the run ends well."""
    process = up(*VLLM, f"run.steps={STEPS}", quiet_s=QUIET_S)
    process.broker()
    process.until_step(1)
    (core,) = cores(vllm_project)
    os.kill(core.pid, signal.SIGKILL)
    summary = process.finish()
    assert summary["steps"] == STEPS
    assert summary["ledger"]["trained"] == STEPS * 16
    assert sum(summary["ledger"]["in_flight"].values()) == 0
    assert summary["mismatch_k3_on_policy"] < 1e-5
    log = process.log("generator-0")
    assert "vLLM's engine core died (EngineCore killed by SIGKILL)" in log
    assert any("generator-0" in line and "restart" in line for line in process.lines)
    assert len(process.steps()) == STEPS
