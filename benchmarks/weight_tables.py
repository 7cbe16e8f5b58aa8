"""What is published of pushes of weights: tables by part of the benchmark, figures and goals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from report import Report, text

MIB = 1 << 20
LOCAL = "same host"
SLOW, FAST = "1 Gbit/s", "10 Gbit/s"
GBIT = {SLOW: 1.0, FAST: 10.0}
SHM, DENSE = "`shm`", "`tcp`, all bytes"
DELTA_6, DELTA_5 = "`tcp`, deltas, lr 1e-6", "`tcp`, deltas, lr 1e-5"
GLOO, FILES = "gloo broadcast, 64 MiB buckets", "safetensors in /dev/shm"
SOCKET = "one plain socket, no cast, no load"
CHAIN, TREE = f"{DENSE}, relays in a chain", f"{DENSE}, relays in a tree"

ONE_HOST, RECEIVERS, LARGE = "one host", "receivers", "large"
LINKS, RELAYS = "links", "relays"
PARTS = (ONE_HOST, RECEIVERS, LARGE, LINKS, RELAYS)

# What documents name, if its form was measured.
FIGURES = (
    "shm_commit_s", "shm_1_floor_s", "shm_3_floor_s", "shm_1_over_floor", "shm_3_over_floor",
    "link_dense_s", "link_commit_s", "link_floor_s", "link_delta_floor_s", "fast_socket_gbit_s",
    "fast_dense_gbit_s", "tree_over_chain",
)  # fmt: skip

Row = dict[str, Any]
COLUMNS: dict[str, Callable[[Row], str]] = {
    "method": lambda r: r["method"],
    "link": lambda r: "-" if r["link"] == LOCAL else r["link"],
    "relays": lambda r: text(r["relays"] or None),
    "receivers": lambda r: text(r["receivers"]),
    "MiB": lambda r: f"{r['nbytes'] / MIB:.0f}",
    "pushes": lambda r: text(r["pushes"]),
    "seconds": lambda r: f"{r['push_s']:.2f}",
    "best": lambda r: f"{r['best_s']:.2f}",
    "bytes / link": lambda r: _seconds(link_floor_s(r), 2),
    "trainer waits": lambda r: _seconds(r["snapshot_s"]),
    "one cast": lambda r: _seconds(r["cast_floor_s"]),
    "generator waits": lambda r: _seconds(r["commit_s"]),
    "own loads, all at once": lambda r: _seconds(r["load_floor_s"]),
    "one copy": lambda r: _seconds(r["copy_floor_s"]),
    "MB on the wire": lambda r: text(r["wire_bytes"] / 1e6) if "`tcp`" in r["method"] else "-",
    "changed": lambda r: f"{r['changed']:.1%}" if r["changed"] else "-",
}


def link_floor_s(row: Row) -> float | None:
    """Seconds that the bytes on the wire take at the rate of the link."""
    return row["wire_bytes"] * 8e-9 / GBIT[row["link"]] if row["link"] in GBIT else None


def summarise(report: Report) -> None:
    """A table for each part, and what was hoped for."""
    for part in PARTS:
        rows = [row for row in report.rows if row["part"] == part]
        cells = {name: [cell(row) for row in rows] for name, cell in COLUMNS.items()}
        shown = [name for name, column in cells.items() if set(column) != {"-"}]
        lines = list(zip(*(cells[name] for name in shown), strict=True))
        report.table(part.replace(" ", "_"), shown if rows else ["method"], lines if rows else [])
    for name in FIGURES:
        report.figure(name, None)
    for goals in (_one_host, _large, _links, _relays):
        for name, value, op, goal in goals(report):
            report.goal(name, value, op, goal)


Goal = tuple[str, float, str, float]


def _found(report: Report, part: str, method: str, count: int, link: str = LOCAL) -> Row | None:
    for row in report.rows:
        if (row["part"], row["method"], row["receivers"], row["link"]) == (
            part, method, count, link,
        ):  # fmt: skip
            return row
    return None


def _one_host(report: Report) -> Iterator[Goal]:
    for count in sorted({r["receivers"] for r in report.rows if r["part"] == ONE_HOST}):
        s = f"{count} receiver{'s' if count > 1 else ''}"
        shm, tcp, gloo, files = (
            _found(report, ONE_HOST, method, count) for method in (SHM, DENSE, GLOO, FILES)
        )
        if shm and count == 1:
            yield "`shm`: trainer waits / one cast", _ratio(shm, "snapshot_s", "cast"), "<=", 1.3
            report.figure("shm_commit_s", shm["commit_s"])
        if shm and shm["load_floor_s"]:
            yield f"{s}: generator waits / own load", _ratio(shm, "commit_s", "load"), "<=", 1.3
            least = shm["cast_floor_s"] + 2 * shm["load_floor_s"]
            report.figure(f"shm_{count}_floor_s", least)
            report.figure(f"shm_{count}_over_floor", shm["push_s"] / least)
        if shm and (peers := [peer for peer in (gloo, files) if peer]):
            best = min(peer["push_s"] for peer in peers)
            goal = 2.0 if count == 3 else 1.5
            yield f"{s}: `shm` over the best peer, bytes/s", best / shm["push_s"], ">=", goal
        if tcp and gloo:
            ratio = gloo["push_s"] / tcp["push_s"]
            yield f"{s}: `tcp` dense over gloo, bytes/s", ratio, ">=", 1.0


def _large(report: Report) -> Iterator[Goal]:
    shm, tcp, gloo = (_found(report, LARGE, method, 1) for method in (SHM, DENSE, GLOO))
    if shm:
        size = f"{shm['nbytes'] / 2**30:.3g} GiB"
        yield f"{size}: trainer waits / one cast", _ratio(shm, "snapshot_s", "cast"), "<=", 1.3
        yield f"{size}: generator waits / own load", _ratio(shm, "commit_s", "load"), "<=", 1.3
    if tcp and gloo:
        size = f"{tcp['nbytes'] / 2**30:.3g} GiB"
        ratio = gloo["push_s"] / tcp["push_s"]
        yield f"{size}: `tcp` dense over gloo, bytes/s", ratio, ">=", 1.0


def _links(report: Report) -> Iterator[Goal]:
    for link in GBIT:
        tcp, gloo = (_found(report, LINKS, method, 1, link) for method in (DENSE, GLOO))
        if tcp and gloo:
            ratio = gloo["push_s"] / tcp["push_s"]
            yield f"{link}: `tcp` dense over gloo, bytes/s", ratio, ">=", 1.0
    dense, sparse = (_found(report, LINKS, method, 1, SLOW) for method in (DENSE, DELTA_6))
    if dense and sparse:
        fewer = (dense["wire_bytes"] / dense["nbytes"]) / (sparse["wire_bytes"] / sparse["nbytes"])
        yield "deltas at lr 1e-6: times fewer bytes", fewer, ">=", 50
        faster = dense["push_s"] / sparse["push_s"]
        yield f"deltas at lr 1e-6: times faster at {SLOW}", faster, ">=", 10
        yield f"generator waits at {SLOW} / one copy", _ratio(dense, "commit_s", "copy"), "<=", 1.3
        report.figure("link_dense_s", dense["push_s"])
        report.figure("link_commit_s", dense["commit_s"])
        report.figure("link_floor_s", link_floor_s(dense))
        report.figure("link_delta_floor_s", link_floor_s(sparse))
    fast = [_found(report, LINKS, method, 1, FAST) for method in (SOCKET, DENSE)]
    for name, row in zip(("socket", "dense"), fast, strict=True):
        if row:
            report.figure(f"fast_{name}_gbit_s", row["nbytes"] * 8e-9 / row["push_s"])


def _relays(report: Report) -> Iterator[Goal]:
    rows = [r for r in report.rows if r["part"] == RELAYS]
    chains = {
        r["relays"]: r for r in rows if r["method"] == CHAIN and r["receivers"] == r["relays"]
    }
    longest = max(chains, default=1)
    if 1 in chains and longest > 1:
        ratio = chains[longest]["push_s"] / chains[1]["push_s"]
        yield f"chain of {longest} relays / one relay, seconds", ratio, "<=", 1.3
    trees = [r for r in rows if r["method"] == TREE and r["relays"] == longest]
    if trees and longest > 1:
        report.figure("tree_over_chain", trees[0]["push_s"] / chains[longest]["push_s"])


def _ratio(row: Row, what: str, floor: str) -> float:
    return row[what] / row[f"{floor}_floor_s"]


def _seconds(value: float | None, digits: int = 3) -> str:
    return f"{value:.{digits}f}" if value else "-"
