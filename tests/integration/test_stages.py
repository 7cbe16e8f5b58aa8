"""A whole run with scorers for all stages, interruptions, evaluations, bad prompts and keys."""

import json
from pathlib import Path

from fakes.commands import UMBRA, call
from fakes.whole_runs import Up


def test_a_run_with_all_stages_evaluations_and_keys(project: Path, up: Up) -> None:
    """`umbra up` takes the keys in its `run.dir`; the weights go over plane `tcp`."""
    call([*UMBRA, "keys"], cwd=project, check=True)
    rows = (project / "prompts.jsonl").read_text()
    (project / "heldout.jsonl").write_text(rows)
    first, _, others = rows.partition("\n")
    too_long = json.dumps({"prompt": "say b" * 40, "word": "b"})
    (project / "prompts.jsonl").write_text(f"{first}\n{too_long}\n{others}")
    process = up(
        'buffer.stages=["reward", "ref_logp", "logp"]',
        "buffer.on_batch=interrupt",
        "generator.partial_flush_tokens=4",
        "data.shuffle=false",
        "eval.every=2",
        "eval.at_ends=false",
        "eval.prompts=heldout.jsonl",
        "eval.samples=8",
        "weight_hub.plane=tcp",
        quiet_s=150.0,
    )
    summary = process.finish()
    assert summary["ledger"]["trained"] == 64
    assert [one["version"] for one in summary["evals"]] == [2, 4]
    assert all(one["answered"] == one["samples"] == 8 for one in summary["evals"])
    counters = json.loads((process.run_dir / "buffer.json").read_text())["counters"]
    for stage in ("reward", "ref_logp", "logp"):
        assert counters[f"scored: {stage}"] >= 64
    assert counters["flushed"]
    assert summary["ledger"]["ended"]["failed"] >= 4
    assert (
        ": prompt 2: the prompt has 202 tokens, which leaves no room for an answer in the context "
        "length, generator.max_context = 64\n"
    ) in process.log("generator-0")
    assert "weights come over plane tcp" in process.log("generator-0")
