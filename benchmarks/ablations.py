"""What each part of the asynchronous mode brings: whole runs with one of them off at a time.

    python benchmarks/ablations.py --json FILE [--seeds 0] [--jobs 2] [--minutes M]

Runs of known times as in `end_to_end.py --form replay`, long-tailed lengths, mode "async". The rows
of one block differ in one thing from the first of it; numbers of accelerators are in brackets. FILE
is written after each run and continued.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import replay_cells
from click.testing import CliRunner
from replay_cells import FORM, MODES, Mode
from report import Report, spread
from whole_runs import Cell

from umbra.services.trainer.make_model import command as make_model

MIX = "long-tailed"
RUN_LIMIT_S = 900.0
ASYNC = MODES[-1]
STEPS = 24
IDLE = ("generator_idle", "trainer_idle")
BIG = ("--hidden", "512", "--layers", "4", "--ff", "1536")  # 13 M parameters
HEAVY = (
    *ASYNC.settings,
    "weight_hub.dtype=bfloat16",
    "weight_hub.plane=tcp",
    "weight_hub.delta=always",
)


@dataclass(frozen=True)
class Part:
    """A row: what is off, in which block, and how a run without it is made."""

    block: str
    name: str
    mode: Mode


def _part(block: str, name: str, base: Mode, *settings: str, **changes: Any) -> Part:
    mode = replace(base, settings=(*base.settings, *settings), steps=STEPS, **changes)
    return Part(block, name, replace(mode, name=name))


_HEAVY = replace(ASYNC, settings=HEAVY, model="big", change_every=50)
# In all rows the pass takes its time: in the trainer on its four accelerators, in a scorer on one.
_STAGE = "buffer.stages=['ref_logp']"
_IN_TRAINER = 1 + replay_cells.REFERENCE
PARTS = (
    _part("loop", "all on", ASYNC),
    _part("loop", "no continuous admission", ASYNC, generator="batchwise_generator.py"),
    _part("loop", "no partials (drain)", ASYNC, "generator.kv_policy=drain"),
    _part("loop", "no prefetch", ASYNC, "generator.prefetch=0"),
    _part("loop", "run_ahead 1, not 4", ASYNC, ahead=1),
    _part("reference", "ref-logprobs in the trainer (4)", ASYNC, more_training=_IN_TRAINER),
    _part(
        "reference",
        "by a scorer (1) beside a trainer (3)",
        ASYNC,
        _STAGE,
        training=3,
        reference=True,
    ),
    _part("reference", "by a scorer (1) beside a trainer (4)", ASYNC, _STAGE, reference=True),
    _part("weights", "staged, delta", _HEAVY),
    _part("weights", "not staged (streamed)", _HEAVY, "generator.receive=streamed"),
    _part("weights", "no delta", _HEAVY, "weight_hub.delta=off"),
)


def key_of(part: Part, seed: int) -> str:
    """Names a run in files."""
    return f"{part.block}/{part.name}/{seed}"


def run_part(key: str, work: Path) -> dict[str, Any]:
    """Do the run; its row."""
    seed = int(key.rpartition("/")[2])
    part = next(one for one in PARTS if key_of(one, seed) == key)
    prepare(work)
    row = replay_cells.run_cell(Cell(FORM, part.mode, MIX, seed), work)
    shown = ("samples_per_s", "utilisation", "generator_idle", "trainer_idle", "staleness")
    pushes = {f"{name}_ms": 1e3 * value for name, value in row["push_seconds"].items()}
    return {
        "key": key,
        "block": part.block,
        "name": part.name,
        "seed": seed,
        **{name: row[name] for name in shown},
        "decoded_per_trained": row["decoded_per_trained"],
        "wire_mb": row["wire_mb"],
        "one_slot_wait_ms": 1e3 * row["one_slot_wait_s"],
        **pushes,
    }


def prepare(work: Path) -> None:
    """The models in `work`, unless they are there."""
    replay_cells.prepare(work)
    if not (work / "big" / "config.json").exists():
        CliRunner().invoke(make_model, [str(work / "big"), *BIG], catch_exceptions=False)


def make_up(
    missing: Sequence[str], args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Run what is missing, each in a process of its own, `args.jobs` at a time."""
    began = time.monotonic()

    def one(key: str) -> dict[str, Any] | None:
        if args.minutes and time.monotonic() - began > 60 * args.minutes:
            return None
        argv = [sys.executable, __file__, "--key", key, "--work", str(args.work)]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{key} failed: {done.stderr.strip()[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])

    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(one, missing):
            if row is not None:
                keep(row)


def summarise(report: Report) -> None:
    """Means over seeds, and samples/s over those of the first of the block."""
    table: list[list[Any]] = []
    first: dict[str, float] = {}
    for part in PARTS:
        some = [r for r in report.rows if (r["block"], r["name"]) == (part.block, part.name)]
        if not some:
            continue
        speed = mean(row["samples_per_s"] for row in some)
        base = first.setdefault(part.block, speed)
        idle = [f"{mean(row[name] for row in some):.0%}" for name in IDLE]
        columns = ("staleness", "total_ms", "wire_mb")
        table.append(
            [part.name, len(some), spread([row["samples_per_s"] for row in some]),
             f"{speed / base:.2f}", " / ".join(idle),
             *(mean(row[name] for row in some) for name in columns)]
        )  # fmt: skip
        name = part.name.partition(" (")[0] if part.block != "reference" else part.name
        report.figure(_key(name), speed / base)
        report.figure(f"{_key(name)}_one_slot_wait_ms", mean(r["one_slot_wait_ms"] for r in some))
        report.figure(f"{_key(name)}_wire_mb", mean(row["wire_mb"] for row in some))
    columns = ["part", "seeds", "samples/s", "of the first of its block"]
    columns += ["generators / trainer idle", "staleness", "push ms", "MB a push"]
    report.table("parts", columns, table)


def _key(name: str) -> str:
    return "".join(mark if mark.isalnum() else "_" for mark in name)


def main() -> int:
    """Run what is missing, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="rows; continued if it exists")
    parser.add_argument("--work", type=Path, default=Path("runs/end-to-end"), help="models, runs")
    parser.add_argument("--blocks", nargs="+", default=["loop", "reference", "weights"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--minutes", type=float, default=0.0, help="start no run later; 0 = all")
    parser.add_argument("--quick", action="store_true", help="the first three rows")
    parser.add_argument("--key", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work = args.work.resolve()
    if args.key:
        print(json.dumps(run_part(args.key, args.work)))
        return 0
    report = Report.begin("ablations", args.json)
    done = {row["key"] for row in report.rows}
    parts = PARTS[:3] if args.quick else [one for one in PARTS if one.block in args.blocks]
    wanted = [key_of(part, seed) for seed in args.seeds for part in parts]
    prepare(args.work)

    def keep(row: dict[str, Any]) -> None:
        report.add(**row)
        if args.json:
            report.write(args.json)
        print(f"{row['key']}: {row['samples_per_s']:.1f} samples/s", flush=True)

    make_up([key for key in wanted if key not in done], args, keep)
    report.restate(summarise)
    report.show(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
