"""Records of a run: its timeline by one clock, and its page."""

import json
import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.slowness import limit

from umbra.deploy.commands import demo
from umbra.deploy.prepare.stage import StageInterrupted
from umbra.deploy.report import POINTS, Figures, command, recorded_look, write_report
from umbra.deploy.run_folder import RunFolder
from umbra.proto.errors import UsageError
from umbra.services.process.files import is_held

T0 = 1_700_000_000.0
NODE = shutil.which("node")
PROGRAM = Path(__file__).parents[1] / "programs" / "draw_page.js"
needs_node = pytest.mark.skipif(NODE is None, reason="no node here")


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
    row("trainer", "step", 2.0, step=1, loss=0.5, samples_per_s=9.0, **{"reward/mean": 0.25}),
    row("trainer", "step", 2.0, step=2, **{"reward/mean": 0.5, "loss": None}),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path, "run")
    made.metrics.write_text("".join(json.dumps(one) + "\n" for one in ROWS) + '{"cut":')
    return made


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


@needs_node
def test_the_page_is_whole_and_needs_nothing_else(folder: RunFolder, tmp_path: Path) -> None:
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
    assert re.findall(r'(?:src|href)="([^"]+)"', text) == ["data:,"]
    assert "default-src 'none'" in text
    assert not {'<link rel="stylesheet', "<img", "<iframe", "@import", "url("} & set(text.split())
    found = drawn(folder, tmp_path)
    for place, expected in (
        ("run", folder.id), ("curves", "reward"), ("curves", "accuracy on held-out prompts"),
        ("curves", "throughput"), ("curves", "staleness of trained samples"),
        ("services", "(work)"), ("services", "decode 3.0 s"), ("services", "25%"),
        ("ledger", "10 issued = 7 trained"),
        ("ledger", "balanced"), ("pushes", "total, p95"), ("counters", "expired_leases 1"),
        ("config", "x</td>"),
    ):  # fmt: skip
        assert expected in found[place]["text"], (place, expected, found[place])
    assert found["curves"]["shapes"].count("polyline") >= 5
    assert found["timeline"]["hidden"] and not found["curves"]["hidden"]


@needs_node
def test_a_run_of_which_little_is_there(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    folder.metrics.write_text("")
    write_report(folder)
    found = drawn(folder, tmp_path)
    assert found["run"]["text"] == folder.id
    assert all(found[place]["hidden"] for place in ("curves", "ledger", "services", "pushes"))


def test_rows_of_several_nodes_are_one_run(folder: RunFolder) -> None:
    """As `cat` appends them, also to a line that a crash has cut."""
    with folder.metrics.open("a") as file:
        file.write("\n" + json.dumps(span("generator-1", "decode", 1.0, 2.0)) + "\n")
    result = CliRunner().invoke(command, [str(folder.path)])
    assert result.exit_code == 0, result.output
    assert ("generator-1", "decode") in complete(folder)


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"metrics\.jsonl does not exist"):
        write_report(RunFolder(tmp_path))


@pytest.mark.parametrize("text", ['{"kind":"span"}', '{"kind":"step"}', '{"kind":"push"}'])
def test_rows_that_no_run_has_written_are_refused(folder: RunFolder, text: str) -> None:
    folder.metrics.write_text(f"{text}\n")
    with pytest.raises(UsageError, match="holds what no run has written"):
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


@needs_node
def test_rollouts_are_shown_with_their_rewards(folder: RunFolder, tmp_path: Path) -> None:
    rollout = {
        "kind": "rollout", "step": 2, "sample": "s-9", "reward": 1.25, "tokens": 5, "turns": 1,
        "reward_parts": {"right": 1.0, "short": 0.25}, "finish_reason": "stop", "staleness": 9,
        "prompt": "<i>ask</i>", "response": "old env new", "seconds": 1.0,
    }  # fmt: skip
    folder.samples.write_text(json.dumps(rollout) + "\n")
    write_report(folder)
    text = drawn(folder, tmp_path)["rollouts"]["text"]
    assert "step 2, s-9: reward 1.25 (right 1, short 0.250), 5 tokens, stop, staleness 9" in text
    assert "<i>ask</i> old env new" in text
    assert "<i>" not in folder.report.read_text()


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
    folder.metrics.write_text(
        "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in ROWS), encoding="utf-8"
    )
    demo.print_next(folder)
    assert capsys.readouterr().out.endswith("\nmean reward of steps 1 to 2: 0.25 ▁█ 0.50\n")
