"""Records of a run: its figures and summary, its overlap by laws, its timeline and its page."""

import json
import re
import shutil
import subprocess
from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.slowness import limit
from hypothesis import given
from hypothesis import strategies as st

from umbra.deploy.commands import demo
from umbra.deploy.prepare.stage import StageInterrupted
from umbra.deploy.report import (
    POINTS,
    Figures,
    command,
    measure,
    overlap,
    recorded_look,
    summarise,
    summary_rows,
    write_report,
    write_summary,
)
from umbra.deploy.run_folder import RunFolder, StepFollower
from umbra.proto.errors import UsageError
from umbra.services.process.child import Usage
from umbra.services.process.files import is_held
from umbra.services.reporting import eval_scores, pass_at_k

NODE = shutil.which("node")
PROGRAM = Path(__file__).parents[1] / "programs" / "draw_page.js"
needs_node = pytest.mark.skipif(NODE is None, reason="no node here")


def row(service: str, kind: str, time: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"time": time, "service": service, "kind": kind, **fields}


def step(number: int, **more: Any) -> dict[str, Any]:
    known = {
        "samples": 8.0, "tokens": 100.0, "response_length/mean": 10.0, "multi_version": 0.25,
        "mismatch/k3_on_policy": 1e-7,
    }  # fmt: skip
    return row("trainer", "step", 2.0, step=number, **{**known, **more})


def span(name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    service = "generator-0" if name in ("decode", "load_weights", "idle") else "trainer"
    return row(service, "span", end, name=name, start=start, end=end, **more)


def evaluated(version: int, accuracy: float, end: float) -> dict[str, Any]:
    return row("buffer", "eval", end, version=version, accuracy=accuracy, seconds=0.1)


ROWS = [
    span("decode", 0, 3, tokens=50, lengths=[1, 2, 3]),
    span("train_step", 1, 2),
    step(1, samples_per_s=9.0, **{"reward/mean": 0.25}),
    row(
        "weight-hub", "push", 2.5, version=1, receiver="generator-0", plane="shm", bytes=10,
        snapshot_s=0.1, wire_s=0.2, stage_s=0.3, commit_s=0.4, total_s=1.0,
    ),
    span("wait_batch", 2, 3),
    span("idle", 3, 4, reason="work"),
    span("train_step", 3, 4),
    step(2, **{"mismatch/k3_on_policy": None, "reward/mean": 0.5, "loss": None}),
    row("buffer", "batch", 1.0, in_flight={"queued": 2, "ready": 6}),
    span("decode", 4, 5),
    span("train_step", 5, 7),
    step(3, **{"mismatch/k3_on_policy": 3e-7, "reward/mean": 0.5}),
]  # fmt: skip
STATUS = {
    "ledger": {"issued": 30, "trained": 24, "ended": {"stale": 2, "cancelled": 4}, "in_flight": {}},
    "staleness": {"mean": 0.5, "max": 2.0, "bound": 2.0},
    "staleness_counts": [3, 4],
    "counters": {"expired_leases": 1},
    "health": {"equal_rewards": 0.5, "truncated": 0.125, "failed_samples": 0.0},
    "warnings": [
        {"name": "equal_rewards", "text": "half", "figures": {}, "since": 2, "until": -1},
        {"name": "truncated", "text": "cut", "figures": {}, "since": 0, "until": 4},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return fill(RunFolder.create(tmp_path, "run"), ROWS)


def fill(folder: RunFolder, rows: list[dict[str, Any]]) -> RunFolder:
    lines = (json.dumps(one, separators=(",", ":")) + "\n" for one in rows)
    folder.metrics.write_text("".join(lines) + '{"cut":')
    folder.buffer.write_text(json.dumps(STATUS))
    return folder


# -- figures and summary ---------------------------------------------------------------------------


def test_measures() -> None:
    result = measure(Figures(ROWS))
    assert (result["steps"], result["samples"], result["pushes"]) == (3, 24, 1)
    assert result["push_seconds"]["stage"] == 0.3
    assert result["mixed_version_trajectories"] == 6
    assert result["mismatch_k3_on_policy"] == 3e-7
    # All of [0, 7): trained for 4 s of it, decoded for 4 s, both for 1 s.
    assert result["overlap"] == {
        "generator_busy": pytest.approx(4 / 7),
        "trainer_busy": pytest.approx(4 / 7),
        "both_busy": pytest.approx(1 / 7),
        "window_s": 7,
    }
    assert result["samples_per_s"] == pytest.approx(24 / 7)
    assert result["tokens_per_s"] == pytest.approx(240 / 7), "of responses, of trained samples"
    result = measure(Figures([*ROWS, evaluated(0, 0.25, 0.5)]))
    assert result["samples_per_s"] == pytest.approx(24 / 6.5), "an evaluation before is no part"


spans = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


def covered(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit cells that `intervals` with whole ends cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(spans, spans)
def test_overlap_is_the_time_that_is_covered(
    left: list[tuple[float, float]], right: list[tuple[float, float]]
) -> None:
    window = set(range(10, 30))
    generating, training = covered(left) & window, covered(right) & window
    running = generating | training  # time in which nothing ran does not count
    result = overlap(right, left, [*left, *right], (10, 30))
    if not running:
        assert result is None
        return
    assert result is not None
    assert result["window_s"] == len(running)
    assert result["generator_busy"] * result["window_s"] == pytest.approx(len(generating))
    assert result["trainer_busy"] * result["window_s"] == pytest.approx(len(training))
    assert result["both_busy"] * result["window_s"] == pytest.approx(len(generating & training))


def test_pass_at_k_is_the_share_of_draws_of_k_answers_that_hold_a_solution() -> None:
    for k in (1, 2, 5, 6):
        for solved in range(7):
            answers = [True] * solved + [False] * (6 - solved)
            draws = [any(draw) for draw in combinations(answers, k)]
            assert pass_at_k(6, solved, k) == pytest.approx(sum(draws) / len(draws))
    for answers, solved, k in ((3, 1, 4), (3, 4, 1), (3, -1, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match=f"pass@{k} of 3 answers"):
            pass_at_k(answers, solved, k)
    # A prompt with too few answers counts where it has enough.
    rewards = {"a": [1.0, 0.0, 0.5, 0.0, 0.0, 0.0], "b": [1.0, 1.0]}
    ones, twos = (1 / 6 + 1) / 2, (1 - 10 / 15 + 1) / 2
    expected = {"pass@1": ones, "pass@2": twos, "pass@4": 1 - 5 / 15, "pass@6": 1.0}
    assert eval_scores(rewards, 6) == pytest.approx({**expected, "mean@6": 1.5 / 6})
    assert eval_scores({"a": [], "b": []}, 4) == {}


def test_summary_of_a_good_run(folder: RunFolder) -> None:
    evals = [evaluated(version, 0.25 + version / 6, 0.5 + version) for version in (0, 2, 3)]
    fill(folder, [*ROWS, *evals])
    folder.model.mkdir()
    (folder.model / "config.json").write_text("{}")
    folder.config.write_text('{"run": {"steps": 3}}')
    known: dict[str, Any] = {"usage": {"trainer": Usage(10.0, 8.0)}, "restarts": {"generator-0": 1}}
    summary = summarise(folder, "finished", 0, 12.5, **known)
    assert summary["run_id"] == folder.id
    assert summary["ledger"]["balance"] == 0
    assert summary["staleness"]["max"] == 2.0
    services = {"trainer": {"wall": 10.0, "cpu": 8.0}}
    assert summary["seconds"] == {"total": 12.5, "services": services}
    assert summary["model"] == str(folder.model)
    assert summary["warnings"] == STATUS["warnings"]
    write_summary(folder, summary)
    assert json.loads(folder.summary.read_text()) == summary
    shown = summary_rows(summary)
    assert dict(shown) | {
        "accuracy": "0.250 -> 0.750",
        "ledger": "30 issued = 24 trained + 2 stale, 4 cancelled, balanced",
        "restarts": "generator-0 1",
        "health": "50.0% of groups with equal rewards, 12.5% of answers cut off, 0.0% of samples "
        "failed",
    } == dict(shown)
    assert [text for name, text in shown if name == "warning"] == [
        "equal_rewards, from step 2 to the end: half",
        "truncated, from step 0 to step 4: cut",
    ]


def test_summary_of_a_run_that_never_began(tmp_path: Path) -> None:
    """Also of one whose buffer was killed. Its page has little, too."""
    folder = RunFolder.create(tmp_path, "run")
    summary = summarise(folder, "interrupted", 130, 0.1)
    assert summary["ledger"] is summary["model"] is summary["samples_per_s"] is None
    assert summary["steps"] == 0
    assert dict(summary_rows(summary))["ended"] == "interrupted"
    folder.metrics.touch()
    write_report(folder)
    found = drawn(folder, tmp_path) if NODE else {}
    assert not found or (found["run"]["text"] == folder.id and found["ledger"]["hidden"])


def test_a_follower_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = StepFollower(path)
    assert follower.new() == []
    first, second = '{"kind":"step","step":1}\n', '{"kind":"step","step":2}\n'
    path.write_text(first + second[:9])
    assert [row["step"] for row in follower.new()] == [1]
    with path.open("a") as file:
        file.write(second[9:] + '{"kind":"push"}\n')
    assert [row["step"] for row in follower.new()] == [2]


# -- the timeline and the page ---------------------------------------------------------------------


def complete(folder: RunFolder) -> dict[tuple[str, str], dict[str, Any]]:
    """The spans of trace.json, by service and name of the first of each."""
    trace = json.loads((folder.path / "trace.json").read_text())
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault((event["cat"], event["name"]), event)
    return found


def test_the_trace_has_the_spans_of_all_services(folder: RunFolder) -> None:
    """And of several nodes, as `cat` appends them, also to a line that a crash has cut."""
    other = span("decode", 1.0, 2.0) | {"service": "generator-1"}
    with folder.metrics.open("a") as file:
        file.write(f"\n{json.dumps(evaluated(1, 0.5, 3.5))}\n{json.dumps(other)}\n")
    result = CliRunner().invoke(command, [str(folder.path)])
    assert result.exit_code == 0, result.output
    spans = complete(folder)
    trained, idle = spans["trainer", "train_step"], spans["generator-0", "idle: work"]
    assert (trained["ts"], trained["dur"]) == (1e6, 1e6)
    assert (idle["ts"], idle["dur"]) == (3e6, 1e6)
    push = spans["weight-hub", "push 1"]
    assert (push["ts"], push["args"]["wire_s"]) == (1.5e6, 0.2)
    assert spans["buffer", "eval of version 1"]["dur"] == 1e5
    assert ("generator-1", "decode") in spans


def drawn(folder: RunFolder, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return the output of the page's own script, by the id of its places."""
    text = folder.report.read_text()
    (data,) = re.findall(r'<script type="application/json" id="recorded">(.*?)</script>', text)
    (script,) = re.findall(r"<script>\n(.*?)</script>", text, re.DOTALL)
    (tmp_path / "page.js").write_text(script)
    (tmp_path / "look.json").write_text(data)
    done = subprocess.run(
        [NODE or "", PROGRAM, tmp_path / "page.js", tmp_path / "look.json"],
        capture_output=True, text=True, check=False, timeout=limit(60),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@needs_node
def test_the_page_is_whole_and_needs_nothing_else(folder: RunFolder, tmp_path: Path) -> None:
    fill(folder, [*ROWS, evaluated(1, 0.5, 3.5) | {"answered": 8, "samples": 8}])
    folder.config.write_text(json.dumps({"run": {"name": "x</td>"}, "eval": {"every": 5}}))
    rollout = {
        "kind": "rollout", "step": 2, "sample": "s-9", "reward": 1.25, "tokens": 5, "turns": 1,
        "reward_parts": {"right": 1.0, "short": 0.25}, "finish_reason": "stop", "staleness": 9,
        "prompt": "<i>ask</i>", "response": "old env new", "seconds": 1.0,
    }  # fmt: skip
    folder.samples.write_text(json.dumps(rollout) + "\n")
    report, _ = write_report(folder)
    text = report.read_text()
    assert re.findall(r'(?:src|href)="([^"]+)"', text) == ["data:,"]
    assert "default-src 'none'" in text and "<i>" not in text
    assert not {'<link rel="stylesheet', "<img", "<iframe", "@import", "url("} & set(text.split())
    found = drawn(folder, tmp_path)
    for place, expected in (
        ("run", folder.id), ("curves", "reward"), ("curves", "accuracy on held-out prompts"),
        ("curves", "throughput"), ("curves", "staleness of trained samples"),
        ("services", "(work)"), ("services", "decode 4.0 s"), ("services", "20%"),
        ("ledger", "30 issued = 24 trained"),
        ("ledger", "balanced"), ("pushes", "total, p95"), ("counters", "expired_leases 1"),
        ("config", "x</td>"), ("rollouts", "<i>ask</i> old env new"),
        ("rollouts", "step 2, s-9: reward 1.25 (right 1, short 0.250), 5 tokens, stop, staleness"),
    ):  # fmt: skip
        assert expected in found[place]["text"], (place, expected, found[place])
    assert found["curves"]["shapes"].count("polyline") >= 5
    assert found["timeline"]["hidden"] and not found["curves"]["hidden"]


@pytest.mark.parametrize("text", ['{"kind":"span"}\n', '{"kind":"step"}\n', None])
def test_rows_that_no_run_has_written_are_refused(folder: RunFolder, text: str | None) -> None:
    folder.metrics.unlink() if text is None else folder.metrics.write_text(text)
    said = r"metrics\.jsonl does not exist" if text is None else "holds what no run has written"
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(command, [str(folder.path)], catch_exceptions=False)


def test_nothing_is_written_through_a_link(folder: RunFolder, tmp_path: Path) -> None:
    """Who made the folder may have put links where the report goes."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in ("report.html", "report.html.part", "trace.json", "trace.json.part"):
        (folder.path / name).symlink_to(mine)
    for path in write_report(folder):
        assert path.is_file() and not path.is_symlink()
    assert mine.read_text() == "mine"


def test_long_runs_are_thinned_out_by_means(folder: RunFolder) -> None:
    steps = [{"kind": "step", "step": n, "loss": float(n % 2)} for n in range(1, 10_001)]
    look = recorded_look(folder, Figures(steps))
    assert len(look["curves"]["steps"]) == POINTS
    assert set(look["curves"]["values"]["loss"]) <= {0.48, 0.5, 0.52}
    assert look["curves"]["steps"][-1] == 10_000


def test_a_demo_holds_its_folder_and_ends_with_a_picture_of_the_reward(
    folder: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """So `umbra monitor` and `umbra runs` know that it is under way while it makes its model."""
    held: list[bool] = []

    def run_demo(*arguments: Any) -> dict[str, Any]:
        held.append(is_held(arguments[2].path))
        raise StageInterrupted

    monkeypatch.setattr(demo, "run_demo", run_demo)
    monkeypatch.setattr(demo.ForkServer, "where_useful", lambda _environ: nullcontext())
    CliRunner().invoke(demo.command, ["--dir", str(tmp_path / "demos"), "--quiet"])
    assert held == [True]
    demo.print_next(folder)
    assert capsys.readouterr().out.endswith("\nmean reward of steps 1 to 3: 0.25 ▁██ 0.50\n")
