"""How long a version of the weights takes from the trainer's tensors to the generators' tensors.

    python benchmarks/weight_push.py [--json FILE] [--size-mib 1024] [--passes 5]
        [--receivers 1,3] [--only shm,tcp,...]

Umbra's planes beside what others do (gloo broadcast in 64 MiB buckets; safetensors files in
/dev/shm) and the floor of all of them, one copy of the tensors in memory; all in one run, passes of
a method in a row after one that warms it up, medians. `push_s` goes from the first byte that the
trainer copies to the last receiver's last loaded tensor. `snapshot_s` is the part of it for which
the trainer waits, `commit_s` that for which a generator waits.

With root's rights, pushes over a link of 1 Gbit/s follow: network namespaces joined by a bridge,
shaped with `tc ... tbf`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import Report
from weight_links import Links, why_not
from weight_model import Model
from weight_peers import push_files, push_gloo
from weight_pushes import Pushed, push_umbra
from weight_roles import ROLES

MIB = 1 << 20


def row(report: Report, method: str, link: str, count: int, runs: list[Pushed]) -> Pushed:
    """Add the medians of `runs`; they are returned too."""
    mid = Pushed(
        push_s=median(run.push_s for run in runs),
        snapshot_s=median(run.snapshot_s for run in runs),
        commit_s=median(run.commit_s for run in runs),
        wire_bytes=round(median(run.wire_bytes for run in runs)),
        nbytes=runs[0].nbytes,
        changed=median(run.changed for run in runs),
        floor_s=median(run.floor_s for run in runs),
    )
    report.add(
        method=method,
        link=link,
        receivers=count,
        gb_per_s=mid.nbytes / mid.push_s / 1e9,
        push_s=mid.push_s,
        best_s=min(run.push_s for run in runs),
        snapshot_s=mid.snapshot_s,
        commit_s=mid.commit_s,
        floor_s=mid.floor_s,
        wire_mb=mid.wire_bytes / 1e6,
        changed_percent=100 * mid.changed,
    )
    return mid


def on_one_host(report: Report, model: Model, options: argparse.Namespace) -> None:
    """Everything over loopback and shared memory."""
    for count in options.receivers:
        got: dict[str, Pushed] = {}
        for name, plane, delta, lr in (
            ("shm", "shm", "off", 1e-6),
            ("tcp dense", "tcp", "off", 1e-6),
            ("tcp delta lr 1e-6", "tcp", "always", 1e-6),
            ("tcp delta lr 1e-5", "tcp", "always", 1e-5),
        ):
            if wanted(options, name):
                runs = push_umbra(model, plane, delta, lr, count, options.passes)
                got[name] = row(report, f"umbra {name}", "local", count, runs)
        for name, push in (("gloo", push_gloo), ("files", push_files)):
            if wanted(options, name):
                runs = push(model, count, options.passes)
                got[name] = row(report, name, "local", count, runs)
        goals(report, count, got)


def goals(report: Report, count: int, got: dict[str, Pushed]) -> None:
    """What was hoped for on one host."""
    s = f"{count} receiver{'s' if count > 1 else ''}"
    if (shm := got.get("shm")) is not None:
        if count == 1:
            report.goal("shm, snapshot / memcpy", shm.snapshot_s / shm.floor_s, "<=", 1.3)
            report.goal("shm, commit / memcpy", shm.commit_s / shm.floor_s, "<=", 1.3)
        peers = [got[name].push_s for name in ("gloo", "files") if name in got]
        if peers:
            report.goal(f"{s}: shm / best peer, bytes/s", min(peers) / shm.push_s, ">=", 1.5)
    if "tcp dense" in got and "gloo" in got:
        ratio = got["gloo"].push_s / got["tcp dense"].push_s
        report.goal(f"{s}: tcp dense / gloo, bytes/s", ratio, ">=", 1.0)


def over_a_link(report: Report, model: Model, options: argparse.Namespace) -> None:
    """The same over 1 Gbit/s, and chains of relays."""
    reason = why_not()
    if reason:
        print(f"skipped: pushes over a shaped link ({reason})")
        return
    with Links(5, rate="1gbit") as links:
        link = "1 Gbit/s"
        got: dict[str, Pushed] = {}
        for name, delta, lr, passes in (
            ("tcp dense", "off", 1e-6, 2),
            ("tcp delta lr 1e-6", "auto", 1e-6, options.passes),
            ("tcp delta lr 1e-5", "auto", 1e-5, options.passes),
        ):
            if wanted(options, "link"):
                runs = push_umbra(model, "tcp", delta, lr, 1, passes, links=links)
                got[name] = row(report, f"umbra {name}", link, 1, runs)
        if got:
            dense, sparse = got["tcp dense"], got["tcp delta lr 1e-6"]
            fewer = dense.wire_bytes / sparse.wire_bytes
            report.goal("delta lr 1e-6, times fewer bytes", fewer, ">=", 50)
            report.goal(
                "delta lr 1e-6, times faster at 1 Gbit/s", dense.push_s / sparse.push_s, ">=", 10
            )
            report.goal("commit at 1 Gbit/s / memcpy", dense.commit_s / dense.floor_s, "<=", 1.3)
        if wanted(options, "chain"):
            times: dict[int, float] = {}
            small = Model(options.chain_mib * MIB, learns=True)
            for count in (1, 4):
                runs = push_umbra(small, "tcp", "off", 1e-6, count, 3, links=links, relays=True)
                name = f"umbra tcp dense, {count} relay{'s' if count > 1 else ''} in a chain"
                times[count] = row(report, name, link, count, runs).push_s
            report.goal("chain of 4 relays / one relay, seconds", times[4] / times[1], "<=", 1.3)


def wanted(options: argparse.Namespace, name: str) -> bool:
    """Whether `--only` lets a measurement pass."""
    return not options.only or any(part in name for part in options.only)


def main() -> int:
    """Run all; 0 even if goals are missed, since they are printed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--chain-mib", type=int, default=256)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--receivers", type=_numbers, default=[1, 3])
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("weight push: from the trainer's tensors to every receiver's tensors")
    model = Model(options.size_mib * MIB, learns=True)
    model.copy_seconds()
    floors = [model.copy_seconds() for _ in range(options.passes)]
    runs = [Pushed(s, s, s, 0, model.nbytes, 0.0, s) for s in floors]
    row(report, "memcpy of the tensors", "local", 1, runs)
    on_one_host(report, model, options)
    over_a_link(report, model, options)
    report.show(options.json)
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _role(arguments: list[str]) -> Any:
    return ROLES[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in ROLES:
        _role(sys.argv[1:])
    else:
        raise SystemExit(main())
