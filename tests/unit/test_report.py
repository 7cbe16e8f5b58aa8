"""What is left of a run: its timeline by one clock, and its page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from umbra.deploy.files.run_folder import RunFolder
from umbra.deploy.report.command import command, write_report
from umbra.deploy.report.recording import Recording, gather
from umbra.deploy.report.svg import bar_chart, line_chart
from umbra.proto.errors import UsageError
from umbra.services.reporting.figures import busy

T0 = 1_700_000_000.0
VOID = {"meta", "br", "input"}


def row(service: str, kind: str, at: float, **fields: Any) -> dict[str, Any]:
    """A row that `service` wrote `at` seconds into the run."""
    return {"time": T0 + at, "service": service, "kind": kind, **fields}


def span(service: str, name: str, start: float, end: float, **fields: Any) -> dict[str, Any]:
    return row(service, "span", end, name=name, start=T0 + start, end=T0 + end, **fields)


PUSH = {
    "version": 1, "receiver": "generator-0", "plane": "shm", "bytes": 10, "snapshot_s": 0.01,
    "wire_s": 0.02, "stage_s": 0.03, "commit_s": 0.04, "total_s": 0.5,
}  # fmt: skip
ROWS = [
    span("generator-0", "decode", 0.0, 1.0, tokens=50, lengths=[1, 2, 3]),
    span("trainer", "wait_batch", 0.0, 1.0),
    span("generator-0", "idle", 1.0, 2.0, reason="work"),
    span("trainer", "train_step", 1.0, 2.0),
    span("generator-0", "decode", 2.0, 4.0),
    row("weight-hub", "push", 2.5, **PUSH),
    row("buffer", "batch", 1.0, in_flight={"queued": 2, "ready": 6}),
    row("buffer", "eval", 3.5, version=1, accuracy=0.5, answered=8, samples=8, seconds=1.0),
    row("trainer", "step", 2.0, step=1, **{"reward/mean": 0.25, "loss": 0.5}),
    row("trainer", "step", 2.0, step=2, **{"reward/mean": 0.5, "loss": None}),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path, "run")
    made.metrics.write_text("".join(json.dumps(one) + "\n" for one in ROWS) + '{"cut":')
    return made


class Page(HTMLParser):
    """Checks that tags are balanced, and collects what a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.refers: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.refers += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def complete(folder: RunFolder) -> dict[tuple[str, str], dict[str, Any]]:
    """The spans of trace.json, by service and name of the first of each."""
    trace = json.loads((folder.path / "trace.json").read_text())
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault((event["cat"], event["name"]), event)
    return found


def test_the_trace_has_the_spans_of_all_services(folder: RunFolder) -> None:
    write_report(folder)
    spans = complete(folder)
    trained, idle = spans["trainer", "train_step"], spans["generator-0", "idle: work"]
    assert trained["ts"] == idle["ts"] == 1e6 * (T0 + 1.0)
    assert trained["dur"] == idle["dur"] == 1e6
    push = spans["weight-hub", "push 1"]
    assert push["ts"] == 1e6 * (T0 + 2.0)
    assert push["args"]["wire_s"] == 0.02
    assert spans["buffer", "eval of version 1"]["dur"] == 1e6


def test_the_trace_names_its_tracks(folder: RunFolder) -> None:
    write_report(folder)
    trace = json.loads((folder.path / "trace.json").read_text())["traceEvents"]
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace
        if event.get("name") == "thread_name"
    }
    assert sorted(names.values()) == ["evals", "main", "main", "to generator-0"]
    assert {(e["pid"], e["tid"]) for e in trace if e["ph"] == "X"} == set(names)
    (counter,) = [event for event in trace if event["ph"] == "C"]
    assert counter["args"] == {"queued": 2, "ready": 6}


def test_figures(folder: RunFolder) -> None:
    figures = gather(Recording([folder.path]))
    assert figures.seconds["generator-0"] == {"decode": 3.0, "idle: work": 1.0}
    assert busy(figures.seconds["generator-0"]) == 0.75
    assert [one["step"] for one in figures.steps] == [1, 2]


def test_the_page_is_whole_and_needs_nothing_else(folder: RunFolder) -> None:
    folder.config.write_text(json.dumps({"run": {"name": "x</td>"}, "eval": {"every": 5}}))
    folder.buffer.write_text(
        json.dumps(
            {
                "ledger": {"issued": 10, "trained": 7, "ended": {"stale": 1},
                           "in_flight": {"ready": 2}},
                "staleness_counts": [3, 4],
                "counters": {"expired_leases": 1},
            }
        )
    )  # fmt: skip
    report, _ = write_report(folder)
    text = report.read_text()
    page = Page(text)
    assert page.open == []
    assert page.refers == []
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in text
    assert "url(" not in text
    for expected in (
        folder.id, "reward", "accuracy on held-out prompts", "75%", "work 25%", "10 issued",
        "7 trained", "balanced", "staleness of trained samples", "p95 ms", "eval",
        "decode 3.0 s", "x&lt;/td&gt;", "expired_leases",
    ):  # fmt: skip
        assert expected in text, expected


def test_a_run_of_which_little_is_there(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    folder.metrics.write_text("")
    report, _ = write_report(folder)
    assert Page(report.read_text()).open == []


def test_folders_of_several_nodes_are_one_run(folder: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.create(tmp_path, "other")
    other.metrics.write_text(json.dumps(span("generator-1", "decode", 1.0, 2.0)) + "\n")
    result = CliRunner().invoke(command, [str(folder.path), "--also", str(other.path)])
    assert result.exit_code == 0, result.output
    assert ("generator-1", "decode") in complete(folder)


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"metrics\.jsonl does not exist"):
        write_report(RunFolder(tmp_path))


def test_charts() -> None:
    assert line_chart({"a": []}, title="x") == ""
    assert bar_chart([0, 0], title="x") == ""
    long = [(float(i), 2.0) for i in range(10_000)]
    chart = line_chart({"a<": long, "b": [(0.0, 1e-9)]}, title="<t>")
    assert chart.count("polyline") == 2
    assert len(chart) < 20_000
    assert "a&lt;" in chart
    assert "&lt;t&gt;" in chart


def test_no_tick_is_cut_off_at_the_left() -> None:
    chart = line_chart({"loss": [(1.0, -0.000123), (2.0, -0.000119)]}, title="loss")
    ticks = re.findall(r'class="end" x="([0-9.]+)" y="[0-9.]+">([^<]+)<', chart)
    assert any(text.startswith("-") for _, text in ticks)
    assert all(6 * len(text) <= float(x) for x, text in ticks), ticks


def test_rollouts_are_shown_with_rewards_and_ages(folder: RunFolder) -> None:
    rollout = {
        "kind": "rollout", "step": 2, "sample": "s-9", "reward": 1.25, "tokens": 5, "turns": 1,
        "reward_parts": {"right": 1.0, "short": 0.25}, "finish_reason": "stop", "staleness": 9,
        "prompt": "<i>ask</i>", "response": "old env new", "seconds": 1.0,
        "pieces": [[4, 2, 9], [4, 1, None], [3, 2, 0]],
    }  # fmt: skip
    folder.samples.write_text(json.dumps(rollout) + "\n")
    write_report(folder)
    text = folder.report.read_text()
    Page(text)
    assert "step 2, s-9: reward 1.25 (right 1, short 0.25), 5 tokens, stop, staleness 9" in text
    assert (
        '&lt;i&gt;ask&lt;/i&gt;</span><span class="age4">old </span><span class="dim">env </span>'
        '<span class="age0">new</span>'
    ) in text
