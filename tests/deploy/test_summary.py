"""The summary of a run, from files as the services write them; its overlap of spans, by laws."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbra.deploy.report import (
    Figures,
    measure,
    overlap,
    summarise,
    summary_rows,
    write_summary,
)
from umbra.deploy.run_folder import RunFolder, StepFollower
from umbra.proto.errors import UsageError
from umbra.services.process.child import Usage


def step(number: int, **more: Any) -> dict[str, Any]:
    row = {
        "samples": 8.0, "tokens": 100.0, "response_length/mean": 10.0, "multi_version": 0.25,
        "mismatch/k3_on_policy": 1e-7,
    }  # fmt: skip
    return {"kind": "step", "service": "trainer", "step": number, **row, **more}


def span(name: str, start: float, end: float) -> dict[str, Any]:
    service = "generator-0" if name in ("decode", "load_weights", "idle") else "trainer"
    return {"kind": "span", "service": service, "name": name, "start": start, "end": end}


ROWS = [
    span("decode", 0, 3),
    span("train_step", 1, 2),
    step(1),
    {"kind": "push", "snapshot_s": 0.1, "wire_s": 0.2, "stage_s": 0.3, "commit_s": 0.4,
     "total_s": 1.0},
    span("wait_batch", 2, 3),
    span("train_step", 3, 4),
    step(2, **{"mismatch/k3_on_policy": None}),
    span("decode", 4, 5),
    span("train_step", 5, 7),
    step(3, **{"mismatch/k3_on_policy": 3e-7}),
]  # fmt: skip
STATUS = {
    "ledger": {"issued": 30, "trained": 24, "ended": {"stale": 2, "cancelled": 4}, "in_flight": {}},
    "staleness": {"mean": 0.5, "max": 2.0, "bound": 2.0},
    "health": {"equal_rewards": 0.5, "truncated": 0.125, "failed_samples": 0.0},
    "warnings": [
        {"name": "equal_rewards", "text": "half", "figures": {"share": 0.5}, "since": 2,
         "until": -1},
        {"name": "truncated", "text": "cut", "figures": {"share": 0.3}, "since": 0, "until": 4},
    ],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


def fill(folder: RunFolder, rows: list[dict[str, Any]] = ROWS) -> None:
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cut":')
    folder.buffer.write_text(json.dumps(STATUS))
    folder.model.mkdir()
    (folder.model / "config.json").write_text("{}")


def eval_row(version: int, accuracy: float, end: float) -> dict[str, Any]:
    row = {"kind": "eval", "service": "buffer", "time": end, "seconds": 0.1}
    return {**row, "version": version, "accuracy": accuracy}


def test_an_evaluation_before_the_first_step_is_no_part_of_the_speed() -> None:
    result = measure(Figures([*ROWS, eval_row(0, 0.25, 0.5)]))
    assert result["samples_per_s"] == pytest.approx(24 / 6.5)


def test_measures() -> None:
    result = measure(Figures(ROWS))
    assert result["steps"] == 3
    assert result["samples"] == 24
    assert result["pushes"] == 1
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


def test_the_speed_of_two_steps_is_that_of_the_run() -> None:
    """Both batches were ready when the first was trained: the second took milliseconds."""
    rows = [
        *(span("decode", second, second + 1) for second in range(100)),
        span("wait_batch", 0, 99.9),
        span("train_step", 99.9, 99.95), step(1, samples=150.0),
        span("wait_batch", 99.95, 99.96),
        span("train_step", 99.96, 100.0), step(2, samples=150.0),
    ]  # fmt: skip
    result = measure(Figures(rows))
    assert result["samples_per_s"] == pytest.approx(3.0)
    assert result["tokens_per_s"] == pytest.approx(30.0)
    assert result["overlap"]["generator_busy"] == pytest.approx(1.0)
    assert result["overlap"]["trainer_busy"] == pytest.approx(0.0009)
    assert result["overlap"]["window_s"] == pytest.approx(100.0)
    one = measure(Figures(rows[:103]))
    assert one["samples_per_s"] == pytest.approx(150 / 99.95)


def test_summary_of_a_good_run(folder: RunFolder) -> None:
    ends = ((0, 0.25), (2, 0.5), (3, 0.75))
    evals = [eval_row(version, accuracy, 0.5 + version) for version, accuracy in ends]
    fill(folder, [*ROWS, *evals])
    folder.config.write_text('{"run": {"steps": 3}}')
    known: dict[str, Any] = {"usage": {"trainer": Usage(10.0, 8.0)}, "restarts": {"generator-0": 1}}
    summary = summarise(folder, "finished", 0, 12.5, **known)
    assert summary["run_id"] == folder.id
    assert summary["ledger"]["balance"] == 0
    assert summary["staleness"]["max"] == 2.0
    assert summary["seconds"] == {
        "total": 12.5,
        "services": {"trainer": {"wall": 10.0, "cpu": 8.0}},
    }
    assert summary["model"] == str(folder.model)
    write_summary(folder, summary)
    assert json.loads(folder.summary.read_text()) == summary
    rows = dict(summary_rows(summary))
    assert rows["accuracy"] == "0.250 -> 0.750"
    assert rows["ledger"] == "30 issued = 24 trained + 2 stale, 4 cancelled, balanced"
    assert rows["restarts"] == "generator-0 1"
    assert rows["health"] == (
        "50.0% of groups with equal rewards, 12.5% of answers cut off, 0.0% of samples failed"
    )
    assert summary["warnings"] == STATUS["warnings"]
    assert [text for name, text in summary_rows(summary) if name == "warning"] == [
        "equal_rewards, from step 2 to the end: half",
        "truncated, from step 0 to step 4: cut",
    ]


def test_summary_of_a_run_that_never_began(folder: RunFolder) -> None:
    summary = summarise(folder, "interrupted", 130, 0.1)
    assert summary["ledger"] is None  # also of one whose buffer was killed
    assert summary["model"] is None
    assert summary["steps"] == 0
    assert summary["samples_per_s"] is None
    assert dict(summary_rows(summary))["ended"] == "interrupted"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"run\.dir"):
        RunFolder.create(tmp_path / "file", "run")


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


spans = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


def covered(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit cells that `intervals` with whole ends cover."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(spans, spans)
def test_it_is_the_time_that_is_covered(
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
