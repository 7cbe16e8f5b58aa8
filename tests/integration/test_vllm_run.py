"""A whole run by `umbra up` with vLLM; a core that dies is in `test_vllm_engine.py`."""

from pathlib import Path

import pytest
from fakes.installed import needs
from fakes.whole_runs import Up

from umbra.services.trainer.make_model import make_model

needs("vllm")
STEPS = 4


@pytest.mark.timeout(400)
def test_a_run_on_vllm(project: Path, up: Up) -> None:
    (project / "model").unlink()
    make_model(project / "model", hidden=64, heads=2, kv_heads=1, layers=1, ff=32)
    process = up(
        'generator.engine="vllm"',
        "generator.engine_args.block_size=32",
        "sampling.max_tokens=24",
        "weight_hub.dtype=float32",
        f"run.steps={STEPS}",
        quiet_s=400.0,
    )
    summary = process.finish()
    assert len(process.steps()) == summary["steps"] == STEPS
    assert summary["ledger"]["trained"] == STEPS * 16
    assert sum(summary["ledger"]["in_flight"].values()) == 0
    assert summary["mismatch_k3_on_policy"] < 1e-5
