"""How long a version of the weights takes from the trainer's tensors to the generators' tensors.

    python benchmarks/weight_push.py [--json FILE] [--size-mib 1024] [--passes 5]
        [--receivers 1,3] [--only shm,tcp,...]

Umbra's planes beside what others do (gloo broadcast in 64 MiB buckets; safetensors files in
/dev/shm); all in one run, passes of a method in a row after two that warm it up, medians. Everyone
starts from float32 tensors and ends with bf16 ones. The trainer's end is `write_shards`, the
generator's the torch engine's load; beside them stand the floors, one cast and one copy of the same
tensors. The hub has its default settings but for plane and delta. `push_s` goes from the first byte
that the trainer copies to the last receiver's last loaded tensor. `snapshot_s` is the part of it
for which the trainer waits, `commit_s` that for which a generator waits.

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
LOCAL, LINK = "same host", "1 Gbit/s"
SHM, DENSE = "`shm`", "`tcp`, all bytes"
DELTA_6, DELTA_5 = "`tcp`, deltas, lr 1e-6", "`tcp`, deltas, lr 1e-5"
OURS = {
    SHM: ("shm", "off", 1e-6),
    DENSE: ("tcp", "off", 1e-6),
    DELTA_6: ("tcp", "always", 1e-6),
    DELTA_5: ("tcp", "always", 1e-5),
}
GLOO = "gloo broadcast, 64 MiB buckets"
PEERS = {GLOO: push_gloo, "safetensors in /dev/shm": push_files}


def row(report: Report, method: str, link: str, count: int, runs: list[Pushed]) -> None:
    """Add the medians of `runs`."""
    names = ("push_s", "snapshot_s", "commit_s", "cast_floor_s", "copy_floor_s")
    report.add(
        method=method,
        link=link,
        receivers=count,
        pushes=len(runs),
        nbytes=runs[0].nbytes,
        wire_bytes=median(run.wire_bytes for run in runs),
        changed=median(run.changed for run in runs),
        best_s=min(run.push_s for run in runs),
        **{name: median(getattr(run, name) for run in runs) for name in names},
    )


def on_one_host(report: Report, model: Model, options: argparse.Namespace) -> None:
    """Everything over loopback and shared memory."""
    for count in options.receivers:
        for method, (plane, delta, lr) in OURS.items():
            if wanted(options, method):
                runs = push_umbra(model, plane, delta, lr, count, options.passes)
                row(report, method, LOCAL, count, runs)
        for method, push in PEERS.items():
            if wanted(options, method):
                row(report, method, LOCAL, count, push(model, count, options.passes, 1e-6))


def over_a_link(report: Report, model: Model, options: argparse.Namespace) -> None:
    """The same over 1 Gbit/s, and chains of relays."""
    reason = why_not()
    if reason:
        print(f"skipped: pushes over a shaped link ({reason})")
        return
    with Links(5, rate="1gbit") as links:
        for method, delta, lr, passes in (
            (DENSE, "off", 1e-6, 2),
            (DELTA_6, "auto", 1e-6, options.passes),
            (DELTA_5, "auto", 1e-5, options.passes),
        ):
            if wanted(options, "link"):
                runs = push_umbra(model, "tcp", delta, lr, 1, passes, links=links)
                row(report, method, LINK, 1, runs)
        if wanted(options, "chain"):
            small = Model(options.chain_mib * MIB, learns=True)
            for count in (1, 4):
                runs = push_umbra(small, "tcp", "off", 1e-6, count, 3, links=links, relays=True)
                row(report, f"{DENSE}, relays in a chain", LINK, count, runs)


def summarise(report: Report) -> None:
    """The table, and what was hoped for."""
    found = {(r["method"], r["link"], r["receivers"]): r for r in report.rows}
    columns = ["method", "link", "receivers", "MiB", "pushes", "seconds", "best", "trainer waits"]
    columns += ["one cast", "generator waits", "one copy", "MB on the wire", "changed"]
    report.table(
        "pushes",
        columns,
        [
            [
                r["method"], r["link"], r["receivers"], f"{r['nbytes'] / MIB:.0f}", r["pushes"],
                f"{r['push_s']:.2f}", f"{r['best_s']:.2f}",
                *(f"{r[name]:.3f}" for name in
                  ("snapshot_s", "cast_floor_s", "commit_s", "copy_floor_s")),
                r["wire_bytes"] / 1e6 if r["method"].startswith("`tcp`") else "-",
                f"{r['changed']:.1%}",
            ]
            for r in report.rows
        ],
    )  # fmt: skip
    for count in sorted({count for _, link, count in found if link == LOCAL}):
        _local_goals(report, found, count)
    dense, sparse = found.get((DENSE, LINK, 1)), found.get((DELTA_6, LINK, 1))
    if dense and sparse:
        fewer, faster = (dense[key] / sparse[key] for key in ("wire_bytes", "push_s"))
        report.goal("deltas at lr 1e-6: times fewer bytes", fewer, ">=", 50)
        report.goal("deltas at lr 1e-6: times faster at 1 Gbit/s", faster, ">=", 10)
        report.goal(
            "pause at 1 Gbit/s / one copy", dense["commit_s"] / dense["copy_floor_s"], "<=", 1.3
        )
        report.figure("link_dense_s", dense["push_s"])
        report.figure("link_commit_s", dense["commit_s"])
        report.figure("link_floor_s", dense["wire_bytes"] * 8 / 1e9)
        report.figure("link_delta_floor_s", sparse["wire_bytes"] * 8 / 1e9)
    chains = [found.get((f"{DENSE}, relays in a chain", LINK, count)) for count in (1, 4)]
    if chains[0] and chains[1]:
        ratio = chains[1]["push_s"] / chains[0]["push_s"]
        report.goal("chain of 4 relays / one relay, seconds", ratio, "<=", 1.3)


def _local_goals(report: Report, found: dict[tuple[str, str, int], Any], count: int) -> None:
    s = f"{count} receiver{'s' if count > 1 else ''}"
    shm, tcp = found.get((SHM, LOCAL, count)), found.get((DENSE, LOCAL, count))
    peers = [found[name, LOCAL, count] for name in PEERS if (name, LOCAL, count) in found]
    if shm and count == 1:
        ratio = shm["snapshot_s"] / shm["cast_floor_s"]
        report.goal("`shm`: snapshot / one cast", ratio, "<=", 1.3)
        ratio = shm["commit_s"] / shm["copy_floor_s"]
        report.goal("`shm`: commit / one copy", ratio, "<=", 1.3)
        report.figure("shm_commit_s", shm["commit_s"])
    if shm and peers:
        ratio = min(peer["push_s"] for peer in peers) / shm["push_s"]
        report.goal(f"{s}: `shm` over the best peer, bytes/s", ratio, ">=", 1.5)
    if tcp and (gloo := found.get((GLOO, LOCAL, count))):
        ratio = gloo["push_s"] / tcp["push_s"]
        report.goal(f"{s}: `tcp` dense over gloo, bytes/s", ratio, ">=", 1.0)


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
    on_one_host(report, model, options)
    over_a_link(report, model, options)
    report.restate(summarise)
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
