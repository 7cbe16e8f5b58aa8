"""Files are whole when the power goes, rows are lost on a full disk; memory is refused in time."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.hub_bench import LAYOUT
from fakes.lossy_disk import LossyDisk, power_cuts

from umbra.deploy.report import command
from umbra.deploy.run_folder import StepFollower, read_rows
from umbra.proto.errors import StartupError, UsageError
from umbra.proto.messages import Subscribed
from umbra.proto.net.keys import OPEN
from umbra.services.process import host as this_host
from umbra.services.process.files import DISK, Disk
from umbra.services.process.metrics import KEPT, MetricsFile, Span, SpanLog, parse_row, steady_clock
from umbra.services.weights.arena import Arena
from umbra.services.weights.planes.receiving import StagedPlanes


def test_a_replaced_file_is_whole_or_as_before(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = LossyDisk(root)
    told: list[tuple[int, bytes]] = [(0, b"")]
    for text in (b"first", b"x" * 3000, b"short"):
        disk.replace(root / "file", text)
        told.append((len(disk.steps), text))
    for step, place in power_cuts(disk, tmp_path, seeds=4):
        path = place / "file"
        found = path.read_bytes() if path.exists() else b""
        last = max(n for n, (at, _) in enumerate(told) if at <= step)
        assert found in [text for _, text in told[last : last + 2]]


def test_a_tree_that_was_synced_is_there(tmp_path: Path) -> None:
    """Its files were written by somebody else, here a library that saves models."""
    synced: list[str] = []

    class Noting(Disk):
        def sync(self, fd: int) -> None:
            synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

        def sync_directory(self, path: Path) -> None:
            synced.append(path.name)

    (tmp_path / "model" / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        (tmp_path / "model" / name).write_bytes(b"x")
    Noting().sync_tree(tmp_path / "model")
    assert sorted(synced[:-1]) == ["a", "b", "inner"] and synced[-1] == "model"


def test_what_is_kept_is_its_owners_and_a_write_that_is_cut_short_goes_on(tmp_path: Path) -> None:
    class Slow(Disk):
        def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
            return super().write(fd, data[:3], offset)

    with Slow().opened(tmp_path / "file") as fd:
        Slow().write_all(fd, b"0123456789", 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"
    DISK.replace(tmp_path / "other", b"x")
    DISK.make_folders(tmp_path / "folder")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"file": 0o600, "other": 0o600, "folder": 0o700}


KIB, SIZE = 1 << 10, LAYOUT.total_bytes
Says = Callable[[str, str], object]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Says:
    """Write one of the kernel's files about memory."""
    for name in ("MEMINFO", "CGROUP_LIMIT", "CGROUP_USED", "CGROUP_STATS"):
        monkeypatch.setattr(this_host, name, tmp_path / name)
    return lambda name, text: (tmp_path / name).write_text(text, encoding="ascii")


def meminfo(nbytes: int) -> str:
    return f"MemTotal: 1 kB\nMemAvailable: {nbytes // KIB} kB\n"


def test_what_is_available_is_the_hosts_or_the_containers(says: Says) -> None:
    assert this_host.available_bytes() == this_host.host_bytes(), "nothing says more"
    for name, text, free, why in (
        ("MEMINFO", meminfo(1000 * KIB), 1000, "the host's"),
        ("CGROUP_LIMIT", "max\n", 1000, "no limit"),
        ("CGROUP_USED", f"{900 * KIB}\n", 1000, "no limit"),
        ("CGROUP_LIMIT", f"{1200 * KIB}\n", 300, "the container's"),
        ("CGROUP_STATS", f"anon 7\ninactive_file {200 * KIB}\n", 500, "cached files make room"),
        ("CGROUP_USED", f"{9000 * KIB}\n", 0, "too much is used"),
    ):
        says(name, text)
        assert this_host.available_bytes() == free * KIB, why


def test_memory_is_refused_before_it_is_taken(
    says: Says, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says("MEMINFO", meminfo(SIZE - KIB))
    planes = StagedPlanes(["tcp"], allocate=lambda _size: pytest.fail("taken"))
    with pytest.raises(StartupError, match=r'are free here: set weight_hub.dtype = "bfloat16"'):
        planes.open(Subscribed(manifest=LAYOUT, plane="tcp", path=""), OPEN)
    monkeypatch.setattr("os.posix_fallocate", lambda *_: pytest.fail("taken"))
    says("MEMINFO", meminfo(2 * SIZE - KIB))
    for make in (partial(Arena.create, run_id, "a"), Arena.anonymous):
        with pytest.raises(StartupError, match=r"slots of the weights .*set weight_hub.slots = 2"):
            make(slot_bytes=SIZE, slots=2)
    assert not list(Path("/dev/shm").glob(f"umbra-{run_id}-*"))


# -- metrics.jsonl --------------------------------------------------------------------------------


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
