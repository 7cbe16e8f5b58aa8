"""Trajectories through the real buffer process, acknowledged and durable, beside other transports.

    python benchmarks/buffer_throughput.py [--json FILE] [--ray] [--seconds 8] [--only PART ...]

Producers and consumer are processes of their own, over tcp loopback. Every transport carries the
same 9 KB records: 200 prompt tokens, 1,000 response tokens with logprobs and version spans. The
rows take turns on one machine; CPU seconds add up all processes of a row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import buffer_peers as peers
from buffer_clients import PRODUCERS, Consumer, Producer, run_workers
from report import Report, cpu_seconds, percentile_ms

OURS = "buffer, durable"
FEW, MANY = 4, 1024  # generators
RUN = """
[run]
steps = 1000000
broker = "tcp://127.0.0.1:*"
[data]
prompts = "prompts.jsonl"
[buffer]
group_size = {group_size}
batch_groups = {batch_groups}
run_ahead = {run_ahead}
max_staleness = 65535
lease_s = 120.0
store_max_bytes = 536870912
"""
# Samples in a batch: so few that the wait for a full one is short, and as many as in the demo.
BATCHES: dict[int, dict[str, int]] = {
    8: {"group_size": 1, "batch_groups": 8, "run_ahead": 64},
    256: {"group_size": 8, "batch_groups": 32, "run_ahead": 8},
}
WARM_S = 2.0  # not counted: all generators ask for their first samples at once
SCALE_RATE = 2000.0  # trajectories per second from any number of generators


class BufferProcess:
    """A real `umbra buffer` in a folder of its own."""

    def __init__(self, folder: Path, **sizes: int) -> None:
        folder.mkdir(parents=True)
        rows = "".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(1000))
        (folder / "prompts.jsonl").write_text(rows)
        (folder / "run.toml").write_text(RUN.format(**sizes))
        self.folder = folder
        read, write = os.pipe()
        argv = ["-m", "umbra", "buffer", "--config", "run.toml", "--run-dir", "run"]
        with (folder / "buffer.log").open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, *argv],
                cwd=folder,
                env={**os.environ, "UMBRA_READY_FD": str(write)},
                pass_fds=(write,),
                stdout=log,
                stderr=log,
            )
        os.close(write)
        with os.fdopen(read) as ready:
            line = ready.readline()
        if not line:
            raise RuntimeError((folder / "buffer.log").read_text())
        self.broker = str(json.loads(line)["broker"])

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


def produce(
    pipe: Connection,
    broker: str,
    names: list[str],
    seconds: float,
    rate: float,
    capacity: int,
    per_submit: int,
    warm_s: float,
) -> None:
    """Body of a producer process; the first `warm_s` seconds are not counted."""
    producer = Producer(broker, names, rate=rate, capacity=capacity, per_submit=per_submit)
    pipe.send("ready")
    pipe.recv()
    if warm_s:
        producer.run(warm_s)
    acked, count, cpu_s = producer.acked, len(producer.latencies), time.process_time()
    producer.run(seconds)
    pipe.send((producer.acked - acked, producer.latencies[count:], time.process_time() - cpu_s))


def consume(pipe: Connection, broker: str, seconds: float, warm_s: float) -> None:
    """Body of the consumer process."""
    consumer = Consumer(broker)
    pipe.send("ready")
    pipe.recv()
    if warm_s:
        consumer.run(warm_s)
    trajectories, count, cpu_s = consumer.trajectories, len(consumer.latencies), time.process_time()
    consumer.run(seconds)
    counted = consumer.trajectories - trajectories
    pipe.send((counted, consumer.latencies[count:], time.process_time() - cpu_s))


def measure_buffer(
    folder: Path,
    *,
    generators: int,
    seconds: float,
    rate: float = 0.0,
    group_size: int = 8,
    batch_groups: int = 32,
    run_ahead: int = 140,
    capacity: int = 64,
    per_submit: int = 16,
    processes: int = PRODUCERS,
    warm_s: float = 0.0,
) -> dict[str, Any]:
    """One run of the buffer; everything that is to be known about it."""
    buffer = BufferProcess(
        folder, group_size=group_size, batch_groups=batch_groups, run_ahead=run_ahead
    )
    try:
        names = [f"generator-{index}" for index in range(generators)]
        sizes = (seconds, rate / processes, capacity, per_submit, warm_s)
        workers: list[Any] = [
            (produce, (buffer.broker, names[i::processes], *sizes)) for i in range(processes)
        ]
        began: list[float] = []  # CPU seconds once all are at work

        def begin() -> None:
            time.sleep(warm_s)
            began.append(cpu_seconds(buffer.popen.pid))

        everyone = [*workers, (consume, (buffer.broker, seconds, warm_s))]
        *produced, consumed = run_workers(everyone, begin)
        acked = sum(one[0] for one in produced)
        buffer_cpu = cpu_seconds(buffer.popen.pid) - began[0]
        clients = sum(one[2] for one in produced) + consumed[2]
        return {
            "acked": acked,
            "per_s": consumed[0] / seconds,  # `acked` may be ahead by the records in flight
            "buffer_us": 1e6 * buffer_cpu / acked,
            "cpu_s_per_1k": 1e3 * (buffer_cpu + clients) / acked,
            "ack": [latency for one in produced for latency in one[1]],
            "end": consumed[1],
        }
    finally:
        buffer.kill()


def show_transports(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Flat-out rates of all transports, in turns, `args.rounds` times."""
    found: dict[str, list[dict[str, float]]] = {}
    for round_number in range(args.rounds):
        ours = measure_buffer(
            folder / f"flat-{round_number}", generators=4, seconds=args.seconds,
            batch_groups=128, run_ahead=7, capacity=256, per_submit=peers.BATCH, warm_s=WARM_S / 2,
        )  # fmt: skip
        found.setdefault(OURS, []).append(ours)
        for name, measured in peers.measure_all(args.seconds, with_ray=args.ray):
            found.setdefault(name, []).append(measured)
            report.count(measured.get("lost_s", 0.0))
    for name, rounds in found.items():
        rates = [one["per_s"] for one in rounds]
        costs = [one["cpu_s_per_1k"] for one in rounds]
        report.add(part="transports", what=name, per_s=rates, cpu_s_per_1k=costs)


def show_latency(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """From submit to ack and to the trainer, and the buffer's cost, at 1,000 trajectories/s."""
    for samples, sizes in BATCHES.items():
        paced = measure_buffer(
            folder / f"paced-{samples}", generators=4, seconds=args.seconds, rate=1000.0,
            per_submit=4, warm_s=WARM_S, **sizes,
        )  # fmt: skip
        ack, end = ([percentile_ms(paced[n], p) for p in (0.5, 0.99)] for n in ("ack", "end"))
        report.add(part="cost", what=samples, buffer_us=paced["buffer_us"], p99_ms=ack[1])
        if samples == min(BATCHES):
            for what, (p50, p99) in (("acknowledgement", ack), ("trainer", end)):
                report.add(part="latency", what=what, per_s=paced["per_s"], p50_ms=p50, p99_ms=p99)


def show_scale(report: Report, args: argparse.Namespace, folder: Path) -> None:
    """Measure a trajectory's cost to the buffer with few and with many generators, in turns."""
    costs: dict[int, list[dict[str, Any]]] = {FEW: [], MANY: []}
    for round_number in range(args.rounds):
        for generators, rounds in costs.items():
            measured = measure_buffer(
                folder / f"scale-{generators}-{round_number}",
                generators=generators,
                seconds=args.seconds,
                rate=SCALE_RATE,
                capacity=16,
                warm_s=WARM_S,
            )
            rounds.append(measured)
    for generators, rounds in costs.items():
        report.add(
            part="scale",
            what=f"{generators}",
            buffer_us=[one["buffer_us"] for one in rounds],
            p99_ms=[percentile_ms(one["ack"], 0.99) for one in rounds],
        )


def summarise(report: Report) -> None:
    """State medians and goals. Ratios are medians over rounds: other load slows a whole round."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in report.rows:
        parts.setdefault(row["part"], []).append(row)
    if transports := parts.get("transports"):
        report.table(
            "transports",
            ["flat out", "trajectories/s", "CPU-s per 1,000"],
            [
                [row["what"], *(statistics.median(row[n]) for n in ("per_s", "cpu_s_per_1k"))]
                for row in transports
            ],
        )
        rates = {row["what"]: row["per_s"] for row in transports}
        costs = {row["what"]: row["cpu_s_per_1k"] for row in transports}
        report.goal("trajectories/s", statistics.median(rates[OURS]), ">=", 18_000)
        if peers.REDIS in rates:
            times = ratio(costs[peers.REDIS], costs[OURS])
            report.goal(f"times the {peers.REDIS}, by CPU", times, ">=", 8.0)
        goals = {peers.REDIS: 5.0, peers.REDIS_KIND: 1.0, peers.RAY: 20.0, peers.RAY_KIND: 1.0}
        for name, goal in goals.items():
            if name in rates:
                report.goal(f"times the {name}", ratio(rates[OURS], rates[name]), ">=", goal)
    for row in parts.get("latency", []):
        name = f"submit to {row['what']} at 1,000/s"
        report.figure(f"p50_ms_{row['what']}", row["p50_ms"])
        report.figure(f"per_s_{row['what']}", row["per_s"])
        report.goal(f"{name}: p99 ms", row["p99_ms"], "<", 50)
    for row in parts.get("cost", []):
        name = f"at 1,000/s in batches of {row['what']}"
        report.goal(f"{name}: CPU us of the buffer", row["buffer_us"], "<=", 150)
        report.goal(f"{name}: p99 ms to acknowledgement", row["p99_ms"], "<", 10)
    if scale := parts.get("scale"):
        (few, most), (few_us, most_us) = ([row[n] for row in scale] for n in ("what", "buffer_us"))
        report.figure("few_us", statistics.median(few_us))
        report.figure("many_us", statistics.median(most_us))
        report.goal(f"cost at {most} / cost at {few} generators", ratio(most_us, few_us), "<=", 1.2)
        if rounds := scale[-1].get("p99_ms"):
            name = f"acknowledgement of {most} generators: p99 ms"
            report.goal(name, statistics.median(rounds), "<", 50)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the ratios of the rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


PARTS = {"transports": show_transports, "latency": show_latency, "scale": show_scale}


def main() -> int:
    """Measure all parts; return 0 if every goal is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--ray", action="store_true", help="also an actor queue (needs ray)")
    parser.add_argument("--seconds", type=float, default=8.0, help="per measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts")
    args = parser.parse_args()
    report = Report("buffer_throughput")
    with tempfile.TemporaryDirectory() as folder_name:
        for part in args.only:
            PARTS[part](report, args, Path(folder_name))
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
