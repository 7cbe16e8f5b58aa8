"""How long pushes of large models would take, by what small ones have measured (simulated).

    python benchmarks/push_at_size.py [--json FILE] [--quick]

What `umbra simulate --push` prints, from `results/weight_push.json` and, for the encryption of
links, `results/security_cost.json`. It measures nothing itself: make it anew after either.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
from report import Report

from umbra.deploy.simulator.push import (
    PushTables,
    PushTimes,
    all_times,
    cells,
    columns,
    measured_costs,
)

RESULTS = Path(__file__).parent / "results"
GB = 1e9


def measured() -> PushTables:
    """The unit costs of this machine."""
    costs = measured_costs(RESULTS / "weight_push.json")
    rows = json.loads((RESULTS / "security_cost.json").read_text(encoding="utf-8"))["rows"]
    push = next(row for row in rows if row["what"].startswith("push"))  # the default: encrypted
    costs["tcp_keys"] = costs["tcp"] * push["ratio"]
    return msgspec.convert({"costs": costs}, PushTables)


def summarise(report: Report) -> None:
    """The table, and the unit costs that it follows from."""
    tables = msgspec.convert(report.facts["tables"], PushTables)
    rows = [msgspec.convert(row, PushTimes) for row in report.rows]
    report.table("pushes", columns(tables), map(cells, rows))
    costs = tables.costs
    for name in ("snapshot", "tcp", "tcp_keys", "delta", "shm", "load"):
        report.figure(f"{name}_gb_s", getattr(costs, name) / GB)
    report.figure("delta_share", costs.delta_share)


def main() -> int:
    """Work it out; there are no goals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--quick", action="store_true", help="changes nothing: it takes no time")
    args = parser.parse_args()
    tables = measured()
    report = Report("pushes of large models (simulated)")
    report.facts["tables"] = msgspec.to_builtins(tables)
    for one in all_times(tables):
        report.add(**msgspec.to_builtins(one))
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
