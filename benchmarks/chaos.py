"""A demo run under random kills, stops, drains and joins of every kind of service.

    python benchmarks/chaos.py [--minutes 10] [--seed 0] [--every 3] [--steps 360] [--dir DIR]
                               [--json FILE]

The sorting demo with its rewards in a scoring stage, `umbra up` on one node and workers that join
from a second one, first undisturbed, then again and again until it was disturbed for so long. Acts
are drawn from the seed; what they meet depends on the machine. `chaos_audit.py` audits each run at
the end by the records of its generators and trainers: every sample that the buffer acknowledged
must have been trained on once, unless a rule ended it.

What it doesn't do: a trainer is killed at most TRAINER_KILLS times between two ends of the whole
run, for a fourth time ends a run, and no process more than KILLS_PER_MINUTE times a minute, for the
same reason; the last one of a kind is not drained; no disk, network or machine fails.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos_acts import Disturber
from chaos_audit import audit, curve
from chaos_run import DemoRun, SecondNode
from report import Report, free_port
from whole_runs import base_model

from umbra.services.config.loader import as_dict, load_config, to_toml

DEMO = Path(__file__).resolve().parents[1] / "examples" / "sort.toml"
ROUND_S = 1800.0  # for a run to end, disturbed or not
POLL_S = 0.1
ENOUGH_S = 5.0  # too little time to disturb another run
CALM = "undisturbed"
COUNTED = ("acknowledged", "trained", "untrained", "lost", "twice", "repeated", "changed")
# Signs of life often enough to time a recovery, limits that the stops go beyond, and all batches
# to look through. An attempt that was cut off is not a sample's fault here.
SETTINGS = (
    "eval.prompts=",
    "buffer.stages=[\"reward\"]",
    "buffer.dead_after_s=5",
    "buffer.lease_s=8",
    "buffer.max_attempts=1000",
    "checkpoint.every=10",
    "checkpoint.keep=1000",
)  # fmt: skip


Row = dict[str, Any]


def one_round(name: str, home: Path, options: argparse.Namespace, disturb_s: float) -> Row:
    """Make one run in `home`, disturbed for so long at most; return its result."""
    folder = home / name
    folder.mkdir()
    (folder / "sort").symlink_to(home / "sort")
    hub = f"tcp://127.0.0.1:{free_port()}"  # fixed: the relay has to find it again
    settings = (
        *SETTINGS,
        f"run.steps={options.steps}",
        f"run.seed={options.seed}",
        f"run.dir={folder / 'runs'}",
        f"weight_hub.listen={hub}",
    )
    config = as_dict(load_config(str(DEMO), overrides=settings))
    (folder / "run.toml").write_text(to_toml(config), encoding="utf-8")
    chance = random.Random(f"{options.seed} {name}")
    with closing(SecondNode()) as node, closing(DemoRun(folder, hub, node)) as run:
        run.start()
        began = time.monotonic()
        disturber = Disturber(run, chance, options.every, say)
        code, disturbed_s = see_through(run, disturber, disturb_s)
        disturber.end()
        left = run.await_end(of_all=True)
        seconds, lives = time.monotonic() - began, run.lives
    if code or left:
        raise SystemExit(
            f"{name} ended with {code}, left {left}: {run.said()} (see {folder / 'up.log'})"
        )
    found = {
        "round": name,
        "seconds": seconds,
        "disturbed_s": disturbed_s,
        "lives": lives,
        "acts": [asdict(act) for act in disturber.done],
        "audit": asdict(audit(run.folder, run.notes)),
        "curve": curve(run.folder),
    }
    assert found["audit"]["steps"] == list(range(1, options.steps + 1)), "a step is missing"
    return found


def see_through(run: DemoRun, disturber: Disturber, disturb_s: float) -> tuple[int, float]:
    """Return the exit code of the run, and for how long it was disturbed."""
    deadline = time.monotonic() + ROUND_S
    first: float | None = None  # when the second node has joined, and disturbing begins
    last = 0.0
    while (code := run.poll()) is None:
        now, status = time.monotonic(), run.look()
        if first is None and status is not None and status.weights and status.version:
            run.join("relay")
            run.join("generator")
            first = last = now
        if first is not None:
            act = now - first < disturb_s
            last = now if act else last
            disturber.turn(status, act=act)
        if now > deadline:
            raise SystemExit(f"the run did not end within {ROUND_S:g} s: {run.said()}")
        time.sleep(POLL_S)
    return code, last - (first or last)


def summarise(report: Report) -> None:
    """State what the acts did to the runs; a row is a round, the undisturbed one is the first."""
    calm = next(row for row in report.rows if row["round"] == CALM)
    wild = [row for row in report.rows if row["round"] != CALM]
    acts = [act for row in wild for act in row["acts"]]
    kinds = ("kill", "stop", "drain", "join")
    table: list[list[Any]] = []
    for service in dict.fromkeys(act["service"] for act in acts):
        cells: list[str] = []
        for kind in kinds:
            some = [act for act in acts if (act["service"], act["kind"]) == (service, kind)]
            times = [act["recovered_s"] for act in some if act["recovered_s"] is not None]
            took = f": {statistics.median(times):.1f} ({max(times):.1f})" if times else ""
            cells.append(f"{len(some)}{took}" if some else "-")
        table.append([service, *cells])
    report.table("acts", ["service", *kinds], table)
    audits = [row["audit"] for row in wild]
    total = {key: sum(audit[key] for audit in audits) for key in COUNTED}
    report.goal("acknowledged samples lost", total["lost"], "<=", 0)
    report.goal("samples trained twice", total["twice"], "<=", 0)
    report.goal("batches that were not the same when repeated", total["changed"], "<=", 0)
    missed = sum(act["recovered_s"] is None for act in acts)
    report.goal("acts without recovery", missed, "<=", 0)
    curves = [statistics.mean(values) for values in zip(*(w["curve"] for w in wild), strict=True)]
    last = curves[-1] / calm["curve"][-1]
    report.goal("reward in the last tenth / undisturbed", round(last, 3), ">=", 0.97)
    for name, value in total.items():
        report.figure(name, value)
    report.figure("runs", len(wild))
    report.figure("steps", len(calm["audit"]["steps"]))
    report.figure("seconds", sum(row["seconds"] for row in wild))
    report.figure("disturbed_s", sum(row["disturbed_s"] for row in wild))
    report.figure("acts", len(acts))
    report.figure("kills", sum(act["kind"] == "kill" for act in acts))
    report.figure(
        "trainer_kills", sum(a["kind"] == "kill" and a["service"] == "trainer" for a in acts)
    )
    report.figure("gone_on", sum(row["lives"] - 1 for row in wild))
    report.figure("ended", sum(sum(audit["ended"].values()) for audit in audits))


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the soak; return 0 if all goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="to disturb, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between acts")
    parser.add_argument("--steps", type=int, default=360, help="of each run")
    parser.add_argument("--dir", type=Path, help="leave the runs in this new folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # with all that was started
    report = Report("chaos", timed=False)
    with tempfile.TemporaryDirectory() as scratch:
        home = (options.dir or Path(scratch)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        say("task, model and warm start")
        base_model(home, "sort", 0).rename(home / "sort")
        say(CALM)
        report.add(**one_round(CALM, home, options, 0.0))
        left = 60 * options.minutes
        while left >= ENOUGH_S:
            say(f"round {len(report.rows)}, {left:.0f} s to go")
            report.add(**one_round(f"round-{len(report.rows)}", home, options, left))
            left -= report.rows[-1]["disturbed_s"]
    report.restate(summarise)
    return 0 if report.show(options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
