"""What keys cost: trajectories through the buffer and weights over plane `tcp`, with and without.

    python benchmarks/security_cost.py [--json FILE] [--seconds 6] [--size-mib 256] [--rounds 3]

Loopback, every process for real, the two ways in turns; medians. The buffer is asked flat out by
four generators and a trainer; a version of the weights goes whole (no deltas) to one receiver.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from bench_keys import VARIABLE
from buffer_throughput import measure_buffer
from report import Report
from weight_model import Model
from weight_pushes import push_umbra

from umbra.services.runtime.net.keys import make_keys

MIB = 1 << 20
WAYS = ("plain", "CURVE")


def choose(way: str, keys: Path) -> None:
    """From now on the processes that start have keys, or have none."""
    os.environ.pop(VARIABLE, None)
    if way == "CURVE":
        os.environ[VARIABLE] = str(keys)


def summarise(report: Report) -> None:
    """The table."""
    rows = [[row[name] for name in ("what", "plain", "CURVE", "ratio")] for row in report.rows]
    report.table("keys", ["what", "without", "with keys", "ratio"], rows)
    cost = report.rows[1]
    report.figure("more_us", cost["CURVE"] - cost["plain"])


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
    pushes: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        make_keys(folder / "keys")
        for number in range(options.rounds):
            for way in WAYS:
                choose(way, folder / "keys")
                found = measure_buffer(
                    folder / f"{way}-{number}", generators=4, seconds=options.seconds,
                    batch_groups=128, run_ahead=3,
                )  # fmt: skip
                rates[way].append(found["per_s"])
                costs[way].append(found["buffer_us"])
                runs = push_umbra(model, "tcp", "off", 1e-6, 1, 3)
                pushes[way] += [run.nbytes / run.push_s for run in runs]
    report = Report("what CURVE costs")
    for what, scale, values in (
        ("buffer flat out, 9 KB trajectories per second", 1.0, rates),
        ("CPU of the buffer per trajectory, microseconds", 1.0, costs),
        (f"push of {options.size_mib} MiB over plane `tcp`, all bytes, MB/s", 1e-6, pushes),
    ):
        plain, curve = (scale * statistics.median(values[way]) for way in WAYS)
        report.add(what=what, plain=plain, CURVE=curve, ratio=round(curve / plain, 2))
    report.restate(summarise)
    report.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
