"""What a run says of itself: what it loses, whether it learns, and the names of its figures."""

import re
from pathlib import Path

from fakes.whole_runs import Up

RAISES = """
def score(prompt: str, completion: str, row: dict) -> float:
    if len(completion) % 4:
        raise KeyError(f"no answer in {completion!r}")
    return float(len(set(completion)))
"""
CONSTANT = """
def score(prompt: str, completion: str, row: dict) -> float:
    return 0.5
"""


def test_a_run_in_which_too_many_samples_fail_ends_with_the_reason(project: Path, up: Up) -> None:
    (project / "tiny_reward.py").write_text(RAISES)
    process = up("run.steps=2")
    summary = process.finish(8)
    reason = summary["exit_reason"]
    assert re.search(r"\d+% of recent samples ended as failed, \d+% by themselves", reason)
    assert "raised KeyError: " in reason and "no answer in " in reason
    assert re.search(r"\(for example sample s-\d+ of prompt \d+\)", reason)
    assert "more than buffer.max_failed_share = 0.5" in reason
    ledger = summary["ledger"]
    assert sum(ledger["in_flight"].values()) == 0
    assert ledger["ended"]["failed"] > 32
    assert any(re.match(r"ledger: \d+ issued = .* failed.*, balanced", li) for li in process.lines)
    assert f"umbra: error: {reason}" in process.lines
    assert any(line.startswith("warning: failed_samples: ") for line in process.lines)
    failed = next(one for one in summary["warnings"] if one["name"] == "failed_samples")
    assert failed["until"] == -1 and failed["figures"]["share"] > 0.5
    assert summary["health"]["failed_samples/run"] > 0.5
    report = (process.run_dir / "report.html").read_text()
    assert "failed_samples, from step" in report
    assert summary["restarts"] == {}, "it would happen again"
    # Once the cause is mended, the run goes on from its store.
    (project / "tiny_reward.py").write_text(CONSTANT)
    after = up(run=process.run_dir).finish()
    assert after["steps"] == 2
    assert after["ledger"]["ended"]["failed"] >= ledger["ended"]["failed"]
    assert 0 < after["health"]["failed_samples/run"] < summary["health"]["failed_samples/run"]
