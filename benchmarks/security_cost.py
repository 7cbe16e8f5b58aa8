"""What keys cost: trajectories through the buffer and weights over plane `tcp`, with and without.

    python benchmarks/security_cost.py [--json FILE] [--seconds 6] [--size-mib 256] [--rounds 3]

Loopback, every process for real, the ways in turns; medians. The buffer is asked flat out by
four generators and a trainer; a version of the weights goes whole (no deltas) to one receiver.
Weights are pushed in two more ways: only authenticated (`security.encrypt_weights = false`), and
over the socket of the orders, which CURVE encrypts, as where the connections for buckets cannot be
made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from bench_keys import AUTHENTICATE, SOCKET, VARIABLE
from buffer_throughput import measure_buffer
from report import Report
from weight_model import Model
from weight_pushes import Pushed, push_umbra

from umbra.proto.net.keys import make_keys

MIB = 1 << 20
WAYS = ("plain", "CURVE")
# Of pushes; with keys ("CURVE") weights are encrypted, and orders go over CURVE.
AUTHENTICATED, OVER_SOCKET = "authenticated", "over the socket"
PUSHES = (*WAYS, AUTHENTICATED, OVER_SOCKET)


def choose(way: str, keys: Path) -> None:
    """From now on the processes that start have keys, or have none."""
    for variable in (VARIABLE, AUTHENTICATE, SOCKET):
        os.environ.pop(variable, None)
    if way != "plain":
        os.environ[VARIABLE] = str(keys)
    if way == AUTHENTICATED:
        os.environ[AUTHENTICATE] = "false"
    if way == OVER_SOCKET:
        os.environ[SOCKET] = "1"


def summarise(report: Report) -> None:
    """The table."""
    rows = [[row[name] for name in ("what", "plain", "CURVE", "ratio")] for row in report.rows]
    report.table("keys", ["what", "without", "with keys", "ratio"], rows)
    cost = report.rows[1]
    report.figure("more_us", cost["CURVE"] - cost["plain"])


def add_pushes(report: Report, size_mib: int, pushes: dict[str, list[Pushed]]) -> None:
    """Rates first, then the CPU time of both ends: of each way, beside that without keys."""

    def median(way: str, what: str) -> float:
        scale = pushes[way][0].nbytes / 1e6 if what == "push_s" else 1e9 / pushes[way][0].nbytes
        found = statistics.median(getattr(run, what) for run in pushes[way])
        return scale / found if what == "push_s" else scale * found

    for what, words in (
        ("push_s", f"push of {size_mib} MiB over plane `tcp`, all bytes, MB/s"),
        ("hub_cpu_s", "CPU seconds of the hub for a GB of it"),
        ("receiver_cpu_s", "CPU seconds of the receiver for a GB of it, with its load"),
    ):
        for way in PUSHES[1:]:
            plain, keyed = median("plain", what), median(way, what)
            name = words if way == "CURVE" else f"{words}: {way}"
            report.add(what=name, plain=plain, CURVE=keyed, ratio=round(keyed / plain, 2))


def main() -> int:
    """Both parts; 0, as there is nothing to be met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--size-mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Model(options.size_mib * MIB, learns=True)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    pushes: dict[str, list[Pushed]] = {way: [] for way in PUSHES}
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        make_keys(folder / "keys")
        for number in range(options.rounds):
            for way in PUSHES:
                choose(way, folder / "keys")
                if way in WAYS:
                    found = measure_buffer(
                        folder / f"{way}-{number}", generators=4, seconds=options.seconds,
                        batch_groups=128, run_ahead=3,
                    )  # fmt: skip
                    rates[way].append(found["per_s"])
                    costs[way].append(found["buffer_us"])
                pushes[way] += push_umbra(model, "tcp", "off", 1e-6, 1, 3)
    report = Report("what keys cost")
    for what, values in (
        ("buffer flat out, 9 KB trajectories per second", rates),
        ("CPU of the buffer per trajectory, microseconds", costs),
    ):
        plain, curve = (statistics.median(values[way]) for way in WAYS)
        report.add(what=what, plain=plain, CURVE=curve, ratio=round(curve / plain, 2))
    add_pushes(report, options.size_mib, pushes)
    report.restate(summarise)
    report.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
