"""The real buffer under recorded traffic: thousands of members that cost it nothing but themselves.

    python benchmarks/buffer_load.py [--json FILE] [--members 1024 4096] [--rates 1000 ... 10000]

What generators say is recorded once, of a run of real processes (`recorded.py`). One process then
plays it back for any number of members over real sockets (`replayed_members.py`), at a rate, or as
fast as the buffer acknowledges. So the buffer has a core, the members and the trainer share a part
of another one, and what is measured is the buffer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import replayed_members
from buffer_throughput import CLOCK_TICKS, BufferProcess
from recorded import Recording, record
from report import Report

GROUP_SIZE, BATCH_GROUPS = 8, 128
HELD = 8  # samples of each member
AHEAD = 8  # batches of trajectories beyond those that members hold
STORE_MAX_BYTES = 4 << 30  # what all members hold, and some batches: nobody waits for disk space
WARM_S = 4.0
FLAT_OUT = 0.0
GOAL_MS = 100.0
PROBE_EVERY_S = 0.05


def threads_s(pid: int) -> dict[str, float]:
    """CPU seconds of each thread so far; its first is the one that decides."""
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        known = "loop" if int(task.name) == pid else name
        found[known] += (int(fields[11]) + int(fields[12])) / CLOCK_TICKS  # type: ignore[assignment]
    return dict(found)


@contextmanager
def disk_probe(folder: Path) -> Iterator[list[float]]:
    """Seconds of small durable writes beside the buffer's: what the disk alone makes it wait."""
    took: list[float] = []
    over = threading.Event()
    fd = os.open(folder / "probe", os.O_WRONLY | os.O_CREAT)

    def write() -> None:
        while not over.wait(PROBE_EVERY_S):
            began = time.perf_counter()
            os.pwrite(fd, bytes(4096), 0)
            os.fdatasync(fd)
            took.append(time.perf_counter() - began)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()
        os.close(fd)


def play(
    folder: Path, recording: Recording, members: int, rate: float, seconds: float
) -> dict[str, Any]:
    """One measurement, with a buffer of its own."""
    # At first each member has a group, of which it answers sample after sample while it is given
    # those of others: until the first ones are complete there are twice as many groups as it holds.
    ahead = 2 * members * HELD // (GROUP_SIZE * BATCH_GROUPS) + AHEAD
    buffer = BufferProcess(
        folder,
        group_size=GROUP_SIZE,
        batch_groups=BATCH_GROUPS,
        run_ahead=ahead,
        store_max_bytes=STORE_MAX_BYTES,
    )
    try:
        orders = replayed_members.Orders(
            broker=buffer.broker, members=members, batch=GROUP_SIZE * BATCH_GROUPS, held=HELD,
            rate=rate, warm_s=WARM_S, seconds=seconds, recording=recording,
        )  # fmt: skip
        file = folder / "orders.msgpack"
        file.write_bytes(msgspec.msgpack.encode(orders))
        argv = [sys.executable, replayed_members.__file__, str(file)]
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdin is not None and client.stdout is not None
            said = [client.stdout.readline()]  # all have joined
            client.stdin.write("go\n")
            client.stdin.flush()
            before: dict[str, float] = {}
            with disk_probe(folder) as disk:
                for line in client.stdout:  # the measurement begins; it is over
                    said.append(line)
                    if len(said) == 2:
                        before = threads_s(buffer.popen.pid)
                        disk.clear()
            spent = threads_s(buffer.popen.pid)
        if len(said) != 3:
            raise RuntimeError(f"members broke off; {(folder / 'buffer.log').read_text()[-2000:]}")
        played = json.loads(said[2])
        done = max(played["per_s"] * seconds, 1.0)
        cpu = {name: value - before.get(name, 0.0) for name, value in spent.items()}
        return {
            "members": members,
            "rate": rate,
            **played,
            "buffer_us": 1e6 * sum(cpu.values()) / done,
            "loop_us": 1e6 * cpu["loop"] / done,
            "loop_share": cpu["loop"] / seconds,
            "buffer_mb": buffer.rss_mb(),
            "disk_most_ms": 1e3 * max(disk, default=0.0),
        }
    finally:
        buffer.kill()


def summarise(report: Report) -> None:
    """The table; what a process can do; the goal of every rate that it keeps up with."""
    columns = ["members", "offered/s", "acknowledged/s", "ack ms p50 / p99", "lease ms p99"]
    columns += ["buffer us each", "its loop us each / of a core", "members' process", "MB"]
    columns += ["disk ms, most"]
    report.table(
        "load",
        columns,
        [
            [
                row["members"], row["rate"] or "flat out", row["per_s"],
                f"{row['ack_p50_ms']:.1f} / {row['ack_p99_ms']:.0f}", row["lease_p99_ms"],
                row["buffer_us"], f"{row['loop_us']:.0f} / {row['loop_share']:.0%}",
                f"{row['cpu_share']:.0%} of a core", row["buffer_mb"], row["disk_most_ms"],
            ]
            for row in report.rows
        ],
    )  # fmt: skip
    flat = [row for row in report.rows if not row["rate"]]
    most = max(row["members"] for row in report.rows)
    for row in flat:
        if row["members"] == most:
            report.figure("saturates_at", row["per_s"])
            report.figure("saturated_us", row["buffer_us"])
            report.figure("saturated_loop_us", row["loop_us"])
    report.figure("members", most)
    report.figure("trajectory_bytes", report.facts["trajectory_bytes"])
    paced = [row for row in report.rows if row["rate"]]
    kept = [row for row in paced if row["members"] == most and _keeps_up(row)]
    report.figure("keeps_up_with", max((row["rate"] for row in kept), default=0.0))
    for row in paced:
        name = f"p99 ms of an acknowledgement, {row['members']:,} members, {row['rate']:,.0f}/s"
        report.goal(name, row["ack_p99_ms"], "<=", GOAL_MS)
    for row in paced:
        if row["rate"] == max(one["rate"] for one in paced):
            name = f"of {row['rate']:,.0f}/s acknowledged, {row['members']:,} members"
            report.goal(name, row["per_s"] / row["rate"], ">=", 0.99)
    report.goal(
        "refused or unanswered", sum(r["refused"] + r["unanswered"] for r in paced), "<=", 0
    )


def _keeps_up(row: dict[str, Any]) -> bool:
    return row["per_s"] >= 0.99 * row["rate"] and row["ack_p99_ms"] <= GOAL_MS


def main() -> int:
    """All sizes and rates; 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--members", nargs="+", type=int, default=[1024, 4096])
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[500, 1000, 2500, 5000, 10_000],
        help="trajectories per second; flat out comes last",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--quick", action="store_true", help="64 members, 500/s")
    args = parser.parse_args()
    if args.quick:
        args.members, args.rates, args.seconds = [64], [500.0], 2.0
    report = Report("buffer_load")
    with tempfile.TemporaryDirectory() as folder:
        recording = record(Path(folder) / "recorded")
        report.facts["trajectory_bytes"] = recording.trajectory_bytes
        for members in args.members:
            for rate in (*args.rates, FLAT_OUT):
                place = Path(folder) / f"{members}-{rate:g}"
                report.add(**play(place, recording, members, rate, args.seconds))
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
