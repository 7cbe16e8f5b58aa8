"""Which embedded store for the buffer: our append log, LMDB or SQLite, doing what the buffer does.

    python benchmarks/store.py [--json FILE] [--records 20000] [--group 64] [--dir FOLDER]

Every record is 9 KB of trajectory and a small state, committed with `fdatasync` in groups, read
once when its batch is formed and deleted when it was trained. LMDB needs `pip install lmdb`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent))

from report import Report

from umbra.services.buffer.store.log import LogStore
from umbra.services.buffer.store.record_format import Value

VALUE_BYTES = 9000
STATE = b"s" * 90
LAG = 4096  # records between the write and the delete of one


class Keys(Protocol):
    """What the buffer needs of a store."""

    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> Value: ...
    def delete(self, key: str) -> None: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...


class Lmdb:
    """LMDB with its default of a sync per commit."""

    def __init__(self, folder: Path) -> None:
        lmdb: Any = importlib.import_module("lmdb")  # which nothing here installs
        self._env = lmdb.open(str(folder), map_size=4 << 30)
        self._txn = self._env.begin(write=True)

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._txn.put(key.encode(), value)

    def get(self, key: str) -> bytes:
        """Read a key."""
        return self._txn.get(key.encode()) or b""

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._txn.delete(key.encode())

    def commit(self) -> None:
        """Commit, and begin anew."""
        self._txn.commit()
        self._txn = self._env.begin(write=True)

    def close(self) -> None:
        """Close it."""
        self._txn.abort()
        self._env.close()


class Sqlite:
    """SQLite in WAL mode with synchronous = FULL."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._db = sqlite3.connect(folder / "store.db", isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")
        self._db.execute("create table kv (k text primary key, v blob) without rowid")
        self._db.execute("begin")

    def put(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._db.execute("insert or replace into kv values (?, ?)", (key, value))

    def get(self, key: str) -> bytes:
        """Read a key."""
        return self._db.execute("select v from kv where k = ?", (key,)).fetchone()[0]

    def delete(self, key: str) -> None:
        """Remove a key."""
        self._db.execute("delete from kv where k = ?", (key,))

    def commit(self) -> None:
        """Commit, and begin anew."""
        self._db.execute("commit")
        self._db.execute("begin")

    def close(self) -> None:
        """Close it."""
        self._db.execute("commit")
        self._db.close()


STORES: dict[str, Callable[[Path], Keys]] = {"append log": LogStore, "lmdb": Lmdb, "sqlite": Sqlite}


def measure(
    make: Callable[[Path], Keys], folder: Path, records: int, group: int
) -> dict[str, float]:
    """Wall and CPU time, time of a commit, and bytes written and left on the disk."""
    store = make(folder)
    value = os.urandom(VALUE_BYTES)
    commits: list[float] = []
    written = _written()
    began, cpu = time.perf_counter(), time.process_time()
    for number in range(records + LAG):
        if number < records:
            store.put(f"t/s-{number}", value)
            store.put(f"s/s-{number}", STATE)
        if number >= LAG:
            store.get(f"t/s-{number - LAG}")
            store.delete(f"t/s-{number - LAG}")
            store.delete(f"s/s-{number - LAG}")
        if number % group == group - 1:
            before = time.perf_counter()
            store.commit()
            commits.append(time.perf_counter() - before)
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - began
    store.close()
    left = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    commits.sort()
    return {
        "per_s": round(records / wall_s),
        "cpu_us": round(1e6 * cpu_s / records, 1),
        "commit_p50_ms": round(1e3 * statistics.median(commits), 2),
        "commit_p99_ms": round(1e3 * commits[int(0.99 * len(commits))], 2),
        "write_amplification": round((_written() - written) / (records * VALUE_BYTES), 2),
        "left_mb": round(left / 1e6, 1),
    }


def _written() -> int:
    """Bytes that this process has caused to be written to the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


def summarise(report: Report) -> None:
    """The table."""
    columns = ["store", "trajectories/s", "CPU us each", "commit p50 ms", "commit p99 ms"]
    names = ("store", "per_s", "cpu_us", "commit_p50_ms", "commit_p99_ms", "write_amplification")
    rows = [[row[name] for name in names] for row in report.rows]
    report.table("stores", [*columns, "write amplification"], rows)
    for row in report.rows:
        report.figure(f"{row['store']} CPU us".replace(" ", "_"), row["cpu_us"])


def main() -> None:
    """All stores, in turns; medians of three."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--group", type=int, default=64, help="records per commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where the stores go  [default: a new folder]")
    args = parser.parse_args()
    report = Report("store")
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        for number in range(args.rounds):
            for name, make in STORES.items():
                try:
                    where = Path(folder) / f"{name}-{number}"
                    found.setdefault(name, []).append(
                        measure(make, where, args.records, args.group)
                    )
                except ImportError:
                    print(f"{name} is not installed: left out")
    for name, rounds in found.items():
        if rounds:
            medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            report.add(store=name, **medians)
    report.restate(summarise)
    report.show(args.json)


if __name__ == "__main__":
    main()
