"""`metrics.jsonl` on a disk that is full: rows are lost and counted, nothing else."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from umbra.deploy.report import command
from umbra.deploy.run_folder import StepFollower, read_rows
from umbra.proto.errors import UsageError
from umbra.services.process.metrics import KEPT, MetricsFile, Span, SpanLog, parse_row, steady_clock


def test_a_full_disk_costs_rows_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room, write, path = math.inf, os.write, tmp_path / "metrics.jsonl"

    def limited(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = write(fd, data[: int(min(room, len(data)))])
        room -= taken
        return taken

    monkeypatch.setattr(os, "write", limited)
    file = MetricsFile(path, "generator-0")
    assert path.stat().st_mode & 0o777 == 0o600, "for its user alone"
    file.write("step", number=0)
    room = 10  # the next one is cut
    with caplog.at_level(logging.WARNING):
        for number in range(1, 4):
            file.write("step", number=number)
        room = math.inf
        file.write("step", number=4)
        file.write("step", number=5)
    assert file.lost == 3
    assert [r.getMessage() for r in caplog.records] == [
        f"metrics cannot be written, {n} rows are lost: No space left on device" for n in (1, 2)
    ]
    assert [row["number"] for row in read_rows(path)] == [0, 4, 5]
    file.close()


TORN = [
    '{"time":1.0,"service":"trainer","kind":"step","re{"time":2.0,"service":"g","kind":"span"}',
    '"kind":"step"',
    '{"kind":"span"',
    '["kind"]',
    "\0\0\0",
]


ROWS = [
    *({"kind": "step", "step": t, "reward/mean": 0.5} for t in (1, 2)),
    *(
        {
            "kind": "span", "name": "decode", "start": t, "end": t + 1, "tokens": 10 + t % 3,
            "steps": 5.0, "prompt_tokens": t % 4, "lengths": [t],
        }
        for t in range(16)
    ),
]  # fmt: skip
LINES = [json.dumps({"time": 1.0, "service": "g", **row}, separators=(",", ":")) for row in ROWS]


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_line_stops_nobody_who_reads(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([LINES[0], torn, *LINES[1:], torn]) + "\n" + torn)
    assert parse_row(torn) is None
    assert len(list(read_rows(path))) == len(LINES)
    assert [row["reward/mean"] for row in StepFollower(path).new()] == [0.5, 0.5]
    for name in ("report.html", "trace.json"):  # rewritten, whatever is there
        (tmp_path / name).write_bytes(b"\xff")
    assert CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False).exit_code == 0
    assert b"\xff" not in (tmp_path / "report.html").read_bytes()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (tmp_path / "summary.json").write_bytes(b'{"exit')
    with pytest.raises(UsageError, match=r"summary\.json cannot be read"):
        CliRunner().invoke(command, [str(tmp_path)], catch_exceptions=False, standalone_mode=False)


def test_a_clock_that_is_set_back_changes_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady_clock()
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert before <= steady_clock() < before + 60


def test_shares_of_the_last_seconds() -> None:
    now = 100.0
    log = SpanLog(lambda: now)
    assert log.shares() == {}
    log.add(Span("old", 50.0, 80.0))
    log.add(Span("train", 88.0, 95.0))  # of which 5 s count
    log.add(Span("idle: work", 95.0, 98.0))
    log.begin("train", 98.0)
    assert log.shares() == {"train": pytest.approx(0.7), "idle: work": pytest.approx(0.3)}
    log.add(Span("train", 98.0, 100.0))
    now = 1000.0
    assert log.shares() == {}, "it does nothing any more"


def test_contiguous_spans_are_joined_and_never_too_many() -> None:
    log = SpanLog(lambda: 0.0)
    log.add(Span("a", 0.0, 1.0))
    log.add(Span("a", 1.0005, 2.0))
    log.add(Span("b", 2.0, 2.5))
    assert log.take() == [Span("a", 0.0, 2.0), Span("b", 2.0, 2.5)]
    assert log.take() == []
    for number in range(2 * KEPT):
        log.add(Span(str(number), float(number), number + 0.5))
    assert len(log.take()) == KEPT


def test_rows_of_the_metrics_file_are_watched() -> None:
    now = 10.0
    file = MetricsFile(None, "generator-0", lambda: now)
    pushes: list[dict[str, Any]] = []
    file.on_push = lambda **fields: pushes.append(fields)
    file.write("push", version=3)
    file.write("step", step=3)
    file.write("span", name="idle", reason="work", start=8.0, end=9.0)
    with file.span("score"):
        assert "score" in file.spans.shares() or now == 10.0
        now = 11.0
    with pytest.raises(TimeoutError), file.span("wait_work"):  # ends what failed as well
        now = 12.0
        raise TimeoutError
    now = 21.0
    assert pushes == [{"version": 3}]
    ended = [Span("idle: work", 8.0, 9.0), Span("score", 10.0, 11.0), Span("wait_work", 11.0, 12.0)]
    assert file.spans.take() == ended
    assert file.spans.shares()["wait_work"] == pytest.approx(0.1)
