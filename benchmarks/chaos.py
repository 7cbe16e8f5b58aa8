"""A demo run under random kills, stops, drains and joins of every kind of service.

    python benchmarks/chaos.py [--minutes 10] [--seed 0] [--every 3] [--steps 360] [--dir DIR]
                               [--keep] [--json FILE]

The sorting demo with its rewards in a scoring stage, `umbra up` on one node and workers that join
from a second one, first undisturbed, then again and again until it was disturbed for so long. Acts
are drawn from the seed; what they meet depends on the machine. With --dir, what was done before
counts: a soak that was broken off, or a longer one, goes on there (its other options must be the
same). Each run is audited in the end: what became of every sample, and which batch trained it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos_acts import Disturber
from chaos_audit import STRETCHES, audit, curve
from chaos_run import UMBRA, DemoRun, SecondNode, free_port
from report import Report

from umbra.deploy.toml import to_toml
from umbra.services.runtime.config_loader import as_dict, load_config

DEMO = Path(__file__).resolve().parents[1] / "examples" / "sort.toml"
ROUND_S = 1800.0  # for a run to end, disturbed or not
POLL_S = 0.1
ENOUGH_S = 5.0  # what is left to disturb and not worth a run
CALM = "undisturbed"
# Signs of life often enough to time a recovery by them, and limits that the stops go beyond. All
# batches are kept, so that they can be looked through. An attempt that was cut off is not a
# sample's fault here.
SETTINGS = (
    "buffer.stages=[\"reward\"]",
    "buffer.heartbeat_s=0.25",
    "buffer.dead_after_s=5",
    "buffer.lease_s=8",
    "buffer.score_lease_s=8",
    "buffer.max_attempts=1000",
    "buffer.score_attempts=1000",
    "checkpoint.every=10",
    "checkpoint.keep=1000",
)  # fmt: skip


class Soak:
    """Rounds of the demo in a folder; each leaves a line in rounds.jsonl.

    Args:
        home: what is in it is gone on with.
        keep: leave the folders of the runs, stores and logs included.
    """

    def __init__(
        self, home: Path, *, steps: int, seed: int, every_s: float, keep: bool = False
    ) -> None:
        self.home = home
        self._steps = steps
        self._seed = seed
        self._every_s = every_s
        self._keep = keep
        self._file = home / "rounds.jsonl"

    def rounds(self) -> list[dict[str, Any]]:
        """What came of the rounds so far."""
        if not self._file.exists():
            return []
        return [json.loads(line) for line in self._file.read_text(encoding="utf-8").splitlines()]

    def prepare(self) -> None:
        """Make task and base model, if they are not there."""
        base = self.home / "sort" / "base"
        if (base / "config.json").exists():
            return
        say("task, model and warm start")
        sizes = ("--prompts", "16384", "--heldout", "16", "--demos", "22400")
        warm = ("sft", "sort/random", "--data", "sort/demos.jsonl", "--out", "sort/base")
        for command in (
            ("make-task", "sort", "--out", "sort", *sizes),
            ("make-model", "sort/random"),
            (*warm, "--steps", "350", "--schedule", "linear", "--threads", "1"),
        ):
            subprocess.run([*UMBRA, *command], cwd=self.home, check=True, capture_output=True)

    def round(self, name: str, disturb_s: float) -> dict[str, Any]:
        """One run from start to end, disturbed for so long at most; what came of it."""
        folder = self.home / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "sort").symlink_to(self.home / "sort")
        hub = f"tcp://127.0.0.1:{free_port()}"  # fixed: the relay has to find it again
        settings = (
            *SETTINGS,
            f"run.steps={self._steps}",
            f"run.seed={self._seed}",
            f"run.dir={folder / 'runs'}",
            f"weight_hub.listen={hub}",
        )
        config = as_dict(load_config(str(DEMO), overrides=settings))
        (folder / "run.toml").write_text(to_toml(config), encoding="utf-8")
        chance = random.Random(f"{self._seed} {name}")
        with closing(SecondNode()) as node, closing(DemoRun(folder, hub, node)) as run:
            run.start()
            began = time.monotonic()
            disturber = Disturber(run, chance, self._every_s, say)
            code, disturbed_s = self._see_through(run, disturber, disturb_s)
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
            "overtaken": dict(disturber.overtaken),
            "audit": asdict(audit(run.folder)),
            "curve": curve(run.folder),
        }
        assert found["audit"]["steps"] == list(range(1, self._steps + 1)), "a step is missing"
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        if not self._keep:
            shutil.rmtree(folder)
        return found

    def _see_through(
        self, run: DemoRun, disturber: Disturber, disturb_s: float
    ) -> tuple[int, float]:
        """The exit code of the run, and for how long it was disturbed."""
        deadline = time.monotonic() + ROUND_S
        first: float | None = None  # when the second node has joined, and disturbing begins
        last = 0.0
        while (code := run.poll()) is None:
            now, status = time.monotonic(), run.look()
            if first is None and status is not None and status.weights and status.version:
                if run.node.is_apart:
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


def tell(rounds: list[dict[str, Any]], file: Path | None) -> bool:
    """Print tables and goals, and write `file`; whether the goals are met."""
    calm = next(found for found in rounds if found["round"] == CALM)
    wild = [found for found in rounds if found["round"] != CALM]
    acts = [act for found in wild for act in found["acts"]]
    report = Report("chaos: acts on a run, and seconds until it had recovered")
    for service, kind in sorted({(act["service"], act["kind"]) for act in acts}):
        chosen = [a for a in acts if (a["service"], a["kind"]) == (service, kind)]
        times = [a["recovered_s"] for a in chosen if a["recovered_s"] is not None]
        report.add(
            service=service, act=kind, count=len(chosen), recovered=len(times),
            median_s=round(statistics.median(times), 2) if times else -1.0,
            max_s=round(max(times), 2) if times else -1.0,
        )  # fmt: skip
    total = {key: sum(found["audit"][key] for found in wild) for key in ("lost", "twice")}
    report.goal("samples lost", total["lost"], "<=", 0)
    report.goal("samples trained twice", total["twice"], "<=", 0)
    changed = sum(found["audit"]["changed"] for found in wild)
    report.goal("batches that were not the same when repeated", changed, "<=", 0)
    missed = sum(act["recovered_s"] is None for act in acts)
    report.goal("acts without recovery", missed, "<=", 0)
    curves = [statistics.mean(values) for values in zip(*(w["curve"] for w in wild), strict=True)]
    last = curves[-1] / calm["curve"][-1]
    report.goal("reward in the last tenth / undisturbed", round(last, 3), ">=", 0.97)
    good = report.show(file)
    beside = Report("chaos: mean reward by tenth of the steps")
    for index in range(STRETCHES):
        by_round = [w["curve"][index] for w in wild]
        beside.add(
            tenth=index + 1, undisturbed=round(calm["curve"][index], 3),
            disturbed=round(curves[index], 3), least=round(min(by_round), 3),
            most=round(max(by_round), 3),
        )  # fmt: skip
    beside.show(file.with_stem(f"{file.stem}-reward") if file else None)
    audits = [found["audit"] for found in wild]
    kills = sum(act["kind"] == "kill" for act in acts)
    overtaken = sum(sum(w["overtaken"].values()) for w in wild)
    print(
        f"{len(wild)} runs, disturbed for {sum(w['disturbed_s'] for w in wild):.0f} of "
        f"{sum(w['seconds'] for w in wild):.0f} s (undisturbed: {calm['seconds']:.0f} s); "
        f"{len(acts)} acts, {kills} of them kills, {overtaken} more that a run's end overtook; "
        f"{sum(w['lives'] - 1 for w in wild)} times gone on; "
        f"{sum(a['trained'] for a in audits)} samples trained, "
        f"{sum(a['repeated'] for a in audits)} batches repeated; ended otherwise: "
        f"{[a['ended'] for a in audits]}"
    )
    return good


def say(line: str) -> None:
    """Tell what goes on."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main() -> int:
    """The soak; 0 if all goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="to disturb, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=float, default=3.0, help="mean seconds between acts")
    parser.add_argument("--steps", type=int, default=360, help="of each run")
    parser.add_argument("--dir", type=Path, help="go on with what is in this folder")
    parser.add_argument("--keep", action="store_true", help="leave the runs in --dir")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # with all that was started
    with tempfile.TemporaryDirectory() as scratch:
        home = (options.dir or Path(scratch)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        soak = Soak(
            home, steps=options.steps, seed=options.seed, every_s=options.every, keep=options.keep
        )
        soak.prepare()
        if not soak.rounds():
            say(CALM)
            soak.round(CALM, 0.0)
        while True:
            done = soak.rounds()
            left = 60 * options.minutes - sum(found["disturbed_s"] for found in done)
            if left < ENOUGH_S:
                break
            say(f"round {len(done)}, {left:.0f} s to go")
            soak.round(f"round-{len(done)}", left)
        return 0 if tell(done, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
