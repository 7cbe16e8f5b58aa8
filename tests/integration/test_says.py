"""What a run says of itself: what it loses, whether it learns, and the names of its figures."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.commands import call
from fakes.whole_runs import DEADLINE_S, UMBRA, Up

from umbra.services.monitor.client import StatusClient
from umbra.services.trainer.member import SHOWN

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
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("algorithms.md", "training.md")
STEPS = "".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)


def names(title: str) -> set[str]:
    """The names in the first column of the table under a heading of docs/operate.md."""
    text = (DOCS / "operate.md").read_text(encoding="utf-8")
    (part,) = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.M)
    cells = re.findall(r"^\| (`.+?) \|", part, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


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


def test_a_run_that_cannot_learn_says_so_everywhere(project: Path, up: Up) -> None:
    (project / "tiny_reward.py").write_text(CONSTANT)
    process = up("run.steps=100000")
    broker = process.broker()
    process.until_step(6)
    with StatusClient(broker) as client:
        process.until(
            lambda: all(m.stats for m in client.status(DEADLINE_S).members if m.role != "monitor"),
            "figures of all members",
        )
    seen = {
        command[-1]: call([*UMBRA, *command[:-1], "--broker", broker], check=True).stdout
        for command in (
            ("status", "--json", "json"), ("status", "plain"), ("monitor", "--once", "monitor"),
        )
    }  # fmt: skip
    subprocess.run([*UMBRA, "drain", "--broker", broker], timeout=DEADLINE_S, check=True)
    summary = process.finish(143)  # drained
    expected = {"constant_reward", "equal_rewards", "zero_gradient"}
    status: dict[str, Any] = json.loads(seen["json"])
    assert expected <= {one["name"] for one in status["warnings"] if one["until"] < 0}
    assert status["health"]["equal_rewards"] == 1.0
    assert expected <= {one["name"] for one in summary["warnings"]}
    rows = {row["name"] for row in process.rows("warning")}
    assert expected <= rows
    report = (process.run_dir / "report.html").read_text()
    for name in expected:
        assert f"warning: {name}: " in seen["plain"]
        assert f"warning: {name}: " in seen["monitor"]
        assert any(line.startswith(f"warning: {name}: ") for line in process.lines), name
        assert f"{name}, from step" in report
    assert "same reward, 0.5: nothing can be learned" in seen["plain"]
    # The first look of those who ask once has rates of what was done before they came.
    assert status["rates"]["samples_per_s"] > 0 and status["rates"]["steps_per_s"] > 0
    assert "samples/s 0 " not in seen["plain"] and "samples/s 0 " not in seen["monitor"]
    assert summary["samples_per_s"] * summary["overlap"]["window_s"] == pytest.approx(
        summary["samples"]
    )
    # What members report, and the columns of a step, are named in the documents.
    stats = {name for member in status["members"] for name in member["stats"]}
    assert stats | {*SHOWN, "step", "scored", "progress_per_s"} == set(names("Figures of members"))
    columns = {name.partition("/")[0] for row in process.steps() for name in row}
    known = set(re.findall(r"\w+", "".join(re.findall(r"`[^`\n]+`", STEPS))))
    assert columns - known == {"time", "service", "kind"}
