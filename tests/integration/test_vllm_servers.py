"""A whole run by `umbra up` over two real `vllm serve`, one of which is killed and started again.

What an engine must do is in `test_vllm_engine.py`, which runs over a server too; what a server may
do at any moment is in `tests/generator/test_http_engine.py`.
"""

import json
from pathlib import Path

import pytest
from fakes.installed import needs
from fakes.ports import reserved_port
from fakes.vllm_serve import VllmServe, serving
from fakes.whole_runs import Up

from umbra.services.trainer.make_model import make_model

needs("vllm")
STEPS = 8


@pytest.mark.real
@pytest.mark.timeout(900)
def test_a_run_over_two_servers(project: Path, up: Up) -> None:
    (project / "model").unlink()
    model = project / "model"
    make_model(model, hidden=64, heads=2, kv_heads=1, layers=1, ff=32)
    held = reserved_port()
    servers = [
        VllmServe(model, project / f"server-{n}.log", seed=n, port=port, context=256)
        for n, port in enumerate((held.getsockname()[1], 0), 1)
    ]
    with held, serving(*servers):
        process = up(
            'generator.engine="vllm-http"',
            f"generator.urls={json.dumps([server.url for server in servers])}",
            "generator.max_context=256",
            "sampling.max_tokens=24",
            "sampling.top_k=8",
            "sampling.top_p=0.9",
            f"run.steps={STEPS}",
            quiet_s=800.0,
        )
        process.until_step(2)
        servers[0].kill()
        process.until_step(4)
        servers[0].start()
        summary = process.finish()
    assert len(process.steps()) == summary["steps"] == STEPS
    assert summary["ledger"]["trained"] == STEPS * 16
    assert sum(summary["ledger"]["in_flight"].values()) == 0
    assert summary["mismatch_k3_on_policy"] < 1e-5
