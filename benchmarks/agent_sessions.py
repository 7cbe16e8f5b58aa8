"""Thousands of sessions that wait for tools: are decode slots full, is memory flat, is all kept?

    python benchmarks/agent_sessions.py [--json FILE] [--quick] [--sessions 2000] [--waves 2]
                                        [--turns 30] [--factor 1] [--slots 16] [--deaths 2]

A whole run by `umbra up`: two generators, each with an endpoint for agents, and four env-workers,
some of which are killed while they work. `--sessions` are under way at once, `--waves` times as
many in all; each has `--turns` turns with tools between that take 0.1 to 60 s (log-uniform), times
`--factor`. The engine is the replay engine: a step takes STEP_S however many sequences there are,
so the tokens decoded over those that full slots would have decoded say how full they were. That is
taken between a tenth and nine tenths of all tokens: before, sessions begin, and after, work ends.
The trainer does not compute.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import waiting_agent
from report import Report
from whole_runs import run

from umbra.deploy.run_folder import RunFolder, read_rows
from umbra.services.config.loader import load_config
from umbra.services.generator.replay_model import ReplayModel
from umbra.services.trainer.make_model import make_model

STEP_S = 5e-3
LENGTHS = [16.0, 48.0, 64.0, 96.0]  # quantiles of the tokens of a turn
MEAN = mean(map(mean, pairwise(LENGTHS)))
GENERATORS, WORKERS = 2, 4
GROUP = 4
PER_PROCESS = 64  # coroutines that share a process
LOOK_S = 1.0
SERVICES = ("buffer", "generator", "env-worker")
STEADY = SERVICES[1:]  # the buffer holds what was generated until a whole batch of it is trained
FULL, FLAT = 0.95, 1.15


@dataclass(frozen=True)
class Load:
    """What is asked of the run."""

    sessions: int  # under way at once
    waves: int
    turns: int
    factor: float
    slots: int  # of a generator
    deaths: int

    @property
    def total(self) -> int:
        """Sessions in all."""
        return self.sessions * self.waves


@dataclass
class Watch:
    """Looks at the processes of a run, and kills env-workers.

    Args:
        runs: folder of the run, by which its processes are told from others.
        tokens: that will be decoded, about.
        deaths: how many workers are killed: at even shares of the tokens.
    """

    runs: str
    tokens: float
    deaths: int
    memory: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    killed: list[float] = field(default_factory=list[float])
    over: threading.Event = field(default_factory=threading.Event)

    def __call__(self) -> None:
        while not self.over.wait(LOOK_S):
            found = processes(self.runs)
            row = {"time": time.time()}
            for service in SERVICES:
                sizes = [rss_mb(pid) for name, pid in found if name.startswith(service)]
                row[service] = max(sizes, default=0.0)
            self.memory.append(row)
            if len(self.killed) == self.deaths:
                continue
            if self._decoded() < self.tokens * (len(self.killed) + 1) / (self.deaths + 1):
                continue
            victims = sorted(one for one in found if one[0].startswith("env-worker"))
            if victims:
                os.kill(victims[len(self.killed) % len(victims)][1], signal.SIGKILL)
                self.killed.append(time.time())

    def _decoded(self) -> float:
        """Tokens so far."""
        folders = [path.parent for path in Path(self.runs).glob("*/metrics.jsonl")]
        rows = (row for folder in folders for row in read_rows(folder / "metrics.jsonl"))
        return sum(row.get("tokens", 0) for row in rows if row["kind"] == "span")


def processes(runs: str) -> list[tuple[str, int]]:
    """Name and pid of the services whose folder is in `runs`."""
    found: list[tuple[str, int]] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        if "--name" in words and any(word.startswith(runs) for word in words):
            found.append((words[words.index("--name") + 1], int(path.name)))
    return found


def rss_mb(pid: int) -> float:
    """Resident memory in MB; 0 if the process is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def prepare(home: Path, load: Load) -> list[str]:
    """Model, prompts and speed of the engine; the configuration."""
    make_model(home / "model", hidden=16, layers=1, ff=32)
    rows = [{"prompt": f"number {n}", "number": n} for n in range(load.total // GROUP)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    speed = ReplayModel(step_s=STEP_S, lengths=LENGTHS)
    (home / "replay.json").write_bytes(msgspec.json.encode(speed))
    at_once = -(-load.sessions // WORKERS)
    settings: dict[str, Any] = {
        "run.dir": home / "runs",
        "run.name": "sessions",
        "run.steps": load.waves,
        "model.path": home / "model",
        "data.prompts": home / "prompts.jsonl",
        "environment.kind": "agent",
        "environment.agent": f"{waiting_agent.__name__}:solve",
        "environment.options.turns": load.turns,
        "environment.options.factor": load.factor,
        "environment.run_on": "env_worker",
        "environment.timeout_s": 600,
        "environment.workers": -(-at_once // PER_PROCESS),
        "env_worker.count": WORKERS,
        # Room for the sessions of one that died, until it is there again.
        "env_worker.sessions": -(-load.sessions // (WORKERS - 1)),
        "sampling.max_tokens": 128,
        "buffer.group_size": GROUP,
        "buffer.batch_groups": load.sessions // GROUP,
        "buffer.run_ahead": max(load.waves - 1, 1),
        "buffer.max_staleness": load.waves,
        "generator.engine": "replay",
        "generator.replay": home / "replay.json",
        "generator.count": GENERATORS,
        "generator.slots": load.slots,
        "generator.sessions": load.sessions // GENERATORS,
        "generator.max_context": 8192,
        "generator.device": "cpu",
        "generator.threads": 1,
        "trainer.device": "cpu",
        "trainer.threads": 1,
        "trainer.batch_wait_s": 3600,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def window(folder: RunFolder) -> tuple[float, float, list[dict[str, Any]]]:
    """From a tenth to nine tenths of all tokens, and the decode spans of the run."""
    spans = [
        row
        for row in read_rows(folder.metrics)
        if row["kind"] == "span" and row["name"] == "decode" and row["end"] > row["start"]
    ]
    spans.sort(key=lambda row: row["end"])
    tokens, total = 0, sum(row["tokens"] for row in spans)
    edges: list[float] = []
    for row in spans:
        tokens += row["tokens"]
        if tokens >= (0.1, 0.9)[len(edges)] * total:
            edges.append(row["end"])
            if len(edges) == 2:
                break
    return edges[0], edges[1], spans


def slots_full(spans: Sequence[Mapping[str, Any]], slots: int, start: float, end: float) -> float:
    """Tokens decoded within the window over those that full slots would have decoded."""
    tokens = 0.0
    for row in spans:
        inside = min(row["end"], end) - max(row["start"], start)
        if inside > 0:
            tokens += row["tokens"] * inside / (row["end"] - row["start"])
    return tokens / (GENERATORS * slots * (end - start) / STEP_S)


def measure(load: Load) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Do the run: memory over time, and what came of it."""
    with tempfile.TemporaryDirectory(prefix="umbra-sessions-") as folder:
        home = Path(folder)
        config = load_config(None, overrides=prepare(home, load))
        watch = Watch(str(home / "runs"), load.total * load.turns * MEAN, load.deaths)
        watcher = threading.Thread(target=watch, name="watch")
        watcher.start()
        try:
            summary, made = run(config, {"trainer": ("timed_trainer.py", "0", "0", "0")})
        finally:
            watch.over.set()
            watcher.join()
        start, end, spans = window(made)
        counters = json.loads((made.path / "buffer.json").read_bytes())["counters"]
        outcome = {
            "seconds": end - start,
            "full": slots_full(spans, load.slots, start, end),
            "trained": summary["ledger"]["trained"],
            "balance": summary["ledger"]["balance"],
            "ended": summary["ledger"]["ended"],
            "killed": len(watch.killed),
            "sessions_lost": counters.get("sessions_lost", 0),
            "turns_per_s": load.turns * 0.8 * load.total / (end - start),
            "start": start,
            "end": end,
        }
        return watch.memory, outcome


def summarise(report: Report) -> None:
    """Tables, figures and goals of the run that is in the rows."""
    (outcome,) = (row for row in report.rows if row["part"] == "run")
    memory = [row for row in report.rows if row["part"] == "memory"]
    load = outcome["load"]
    inside = [row for row in memory if outcome["start"] <= row["time"] <= outcome["end"]]
    middle = (outcome["start"] + outcome["end"]) / 2
    cells: list[list[Any]] = []
    growth = 1.0
    for service in SERVICES:
        first = max((row[service] for row in inside if row["time"] < middle), default=0.0)
        second = max((row[service] for row in inside if row["time"] >= middle), default=0.0)
        cells.append([service, first, second, max(row[service] for row in memory)])
        if first and service in STEADY:
            growth = max(growth, second / first)
    columns = ["largest process, MB", "first half", "second half", "whole run"]
    report.table("memory", columns, cells)
    asked = load["sessions"] * load["waves"]
    report.table(
        "run",
        ["sessions", "at once", "turns", "env-workers killed", "sessions lost with them",
         "turns/s", "slots full", "samples lost"],
        [[asked, load["sessions"], load["turns"], outcome["killed"], outcome["sessions_lost"],
          outcome["turns_per_s"], f"{outcome['full']:.1%}", asked - outcome["trained"]]],
    )  # fmt: skip
    report.figure("full", outcome["full"])
    report.figure("memory_growth", growth)
    report.figure("sessions_lost", outcome["sessions_lost"])
    report.goal("share of decode slots that are full", outcome["full"], ">=", FULL)
    report.goal("memory of generators and workers, second half over first", growth, "<=", FLAT)
    report.goal("samples trained of those asked for", outcome["trained"] / asked, ">=", 1.0)
    report.goal("samples unaccounted for", abs(outcome["balance"]), "<=", 0)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--quick", action="store_true", help="a few sessions of a few turns")
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--factor", type=float, default=1.0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--deaths", type=int, default=2)
    given = parser.parse_args()
    load = Load(given.sessions, given.waves, given.turns, given.factor, given.slots, given.deaths)
    if given.quick:
        load = Load(sessions=48, waves=2, turns=4, factor=0.005, slots=4, deaths=1)
    here = str(Path(__file__).parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    report = Report(
        f"agent_sessions: {load.sessions} sessions at once, {load.total} in all, of {load.turns} "
        f"turns; tools of 0.1 to 60 s times {load.factor:g}; {GENERATORS} generators of "
        f"{load.slots} slots, {WORKERS} env-workers"
    )
    memory, outcome = measure(load)
    report.add(part="run", load=msgspec.to_builtins(load), **outcome)
    for row in memory:
        report.add(part="memory", **row)
    report.restate(summarise)
    return 0 if report.show(given.json) else 1


if __name__ == "__main__":
    sys.exit(main())
