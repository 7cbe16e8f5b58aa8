"""A whole run with scorers for every stage, interruptions and evaluations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.slowness import seconds


@pytest.mark.e2e
@pytest.mark.timeout(180)
def test_a_run_with_all_stages_and_evaluations(project: Path) -> None:
    (project / "heldout.jsonl").write_text((project / "prompts.jsonl").read_text())
    changes = {
        "buffer.stages": '["reward", "ref_logp", "logp"]',
        "buffer.on_batch": "interrupt",
        "generator.partial_flush_tokens": "4",
        "eval.every": "2",
        "eval.prompts": "heldout.jsonl",
        "eval.samples": "8",
    }
    overrides = [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    ended = subprocess.run(
        [sys.executable, "-m", "umbra", "up", "run.toml", "--no-eval", "--json", *overrides],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=seconds(150),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["ledger"]["trained"] == 64 and summary["ledger"]["balance"] == 0
    assert [one["version"] for one in summary["evals"]] == [2, 4]
    assert all(one["answered"] == one["samples"] == 8 for one in summary["evals"])
    (run_dir,) = (project / "runs").iterdir()
    counters = json.loads((run_dir / "buffer.json").read_text())["counters"]
    for stage in ("reward", "ref_logp", "logp"):
        assert counters[f"scored: {stage}"] >= 64
    assert counters["flushed"]
