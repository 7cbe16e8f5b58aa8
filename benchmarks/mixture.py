"""A model of ten million parameters on a mixture of reasoning-gym: synchronous and asynchronous.

    python benchmarks/mixture.py [--quick] [--json FILE] [--work DIR] [--modes MODE ...]
                                 [--seeds 0 1 2]

The example of examples/reasoning-gym: its model is made and warm-started once, then trained in each
mode and by each seed for the same number of steps on the same prompts. The time to an accuracy is
from the first decoded token to the commit after which the last ten batches, 2,560 samples of all
environments drawn at temperature 1, have that mean reward; the accuracy is the highest multiple of
0.02 that all of our runs reach. TRL makes as many of these steps as it can in PEER_S
(`trl_peer.py`). FILE is written after each run and continued, runs that are in it are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from demo_cells import CORES, MODES, Mode, TrlMode, reached
from report import Report, spread, text
from whole_runs import steady

from umbra.deploy.run_folder import RunFolder, read_rows
from umbra.services.config.loader import load_config
from umbra.services.environments.gym import ReasoningGym

EXAMPLE = Path(__file__).parents[1] / "examples" / "reasoning-gym"
ENVIRONMENTS = ("sums", "spelling", "equations")
SYNCHRONOUS = MODES[:2]
ASYNCHRONOUS = Mode("async", ())  # as the example's file has it
RUNS = (*SYNCHRONOUS, ASYNCHRONOUS)
PEER = TrlMode("TRL, 2 threads", 2)
PEER_S = 400.0  # seconds that it may take
GRID = 50  # accuracies that are tried, in one
WARM = 5  # steps before rates and shares are measured
ENDS = 5  # steps whose mean reward is that of the beginning, and of the end
BELOW_S = 3600.0
FASTER_THAN_TRL = 3.0
SIZES = ("--hidden", "512", "--layers", "4", "--heads", "8", "--kv-heads", "4", "--ff", "1152")
WARM_START = ("--steps", "400", "--batch", "32", "--lr", "1e-3", "--schedule", "linear")
FEW = ("run.steps=12", "buffer.batch_groups=4", "eval.samples=8")


Rows = Sequence[dict[str, Any]]


def prepare(work: Path, *, quick: bool) -> dict[str, Any]:
    """Data, model and warm start in `work`, unless they are there; facts of them."""
    if not (work / "mixture" / "base" / "config.json").exists():
        _python(work, str(EXAMPLE / "prepare.py"), "mixture")
        sizes = () if quick else SIZES
        _umbra(
            work, "make-model", "mixture/random", *sizes, "--context", "256", "--init-std", "0.02"
        )
        how = (*WARM_START, *(("--steps", "4") if quick else ()), "--threads", "1", "--json")
        data = ("--data", "mixture/demos.jsonl", "--out", "mixture/base")
        told = _umbra(work, "sft", "mixture/random", *data, *how)
        (work / "warm.json").write_text(told, encoding="utf-8")
    warm = json.loads((work / "warm.json").read_text(encoding="utf-8"))
    weights = (work / "mixture" / "base" / "model.safetensors").stat().st_size
    return {"warm": warm, "parameters": weights // 4}


def learn(work: Path, mode: Mode | TrlMode, seed: int, *, quick: bool) -> dict[str, Any]:
    """A run in that mode, in processes of its own; its row."""
    if isinstance(mode, TrlMode):
        few = ("--quick",) if quick else ()
        told = _python(work, __file__, "--peer", str(seed), "--work", str(work.parent), *few)
        return json.loads(told.splitlines()[-1])
    settings = [f"run.seed={seed}", *mode.settings, *(FEW if quick else ())]
    chosen = [word for one in settings for word in ("--set", one)]
    load = os.getloadavg()[0]
    # Else threads of two processes that take turns wait for each other in loops (demo_cells).
    quiet = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    told = _umbra(work, "up", str(EXAMPLE / "run.toml"), "--json", *chosen, environ=quiet)
    summary = json.loads(told)
    folder = RunFolder(work / "runs" / summary["run_id"])
    loads = [load, os.getloadavg()[0]]
    return {"mode": mode.name, "seed": seed, "load": loads, **row_of(folder, summary)}


def row_of(folder: RunFolder, summary: dict[str, Any]) -> dict[str, Any]:
    """What a run came to, and each of its steps."""
    rows = list(read_rows(folder.metrics))
    began = min(r["start"] for r in rows if r["kind"] == "span" and r["name"] == "decode")
    steps = sorted((row for row in rows if row["kind"] == "step"), key=lambda row: row["step"])
    done = steady(folder, first=min(WARM, len(steps) // 2), last=len(steps), generators=1)
    cpu_s = {name: used["cpu"] for name, used in summary["seconds"]["services"].items()}
    k3 = [row["mismatch/k3"] for row in steps if row["mismatch/k3"] is not None]
    return {
        "steps": len(steps),
        "samples": summary["samples"],
        "seconds": steps[-1]["time"] - began,
        "samples_per_s": done.samples / done.seconds,
        "step_s": done.step_s,
        "generator_idle": done.generator_idle,
        "trainer_idle": done.trainer_idle,
        "both_busy": summary["overlap"]["both_busy"],
        "staleness": done.staleness,
        "staleness_max": done.staleness_max,
        "k3": mean(k3),
        "k3_on_policy": summary["mismatch_k3_on_policy"],
        "ess": mean(row["ess"] for row in steps if row["ess"] is not None),
        "mixed": summary["mixed_version_trajectories"] / summary["samples"],
        "push_s": summary["push_seconds"],
        "cpu_s": cpu_s,
        "ledger": summary["ledger"],
        "heldout": [summary["accuracy_before"], summary["accuracy_after"]],
        "steady": asdict(done),
        "curve": [
            {
                "s": round(row["time"] - began, 2),
                "reward": round(row["reward/mean"], 4),
                "staleness": round(row["staleness/total/mean"], 3),
                "k3": row["mismatch/k3"],
                **{
                    name: round(row[f"environment/{name}/reward"], 4)
                    for name in ENVIRONMENTS
                    if f"environment/{name}/reward" in row
                },
            }
            for row in steps
        ],
    }


def peer(work: Path, seed: int, *, quick: bool) -> dict[str, Any]:
    """TRL's GRPOTrainer on the same model, prompts, batches and schedule, in this process."""
    import trl_peer  # imports TRL

    few = FEW if quick else ()
    config = load_config(EXAMPLE / "run.toml", overrides=list(few), environ={})
    rows = [json.loads(line) for line in (work / "mixture" / "prompts.jsonl").open()]
    data = [
        {"prompt": row["prompt"], "environment": row["environment"], "row": json.dumps(row)}
        for row in rows
    ]
    verifier = ReasoningGym()
    seen: list[dict[str, float]] = []

    def score(completions: list[Any], row: list[str], environment: list[str], **_: Any) -> Any:
        rewards: list[float] = []
        for completion, line in zip(completions, row, strict=True):
            verifier.reset(json.loads(line))
            rewards.append(verifier.step(completion[0]["content"]).reward)
        means = {
            name: [r for r, one in zip(rewards, environment, strict=True) if one == name]
            for name in ENVIRONMENTS
        }
        seen.append({name: mean(found) for name, found in means.items() if found})
        return rewards

    watch = trl_peer.Watch(PEER_S, lambda _: False)
    base = work / "mixture" / "base"
    steps = config.run.steps
    trl_peer.train(base, data, score, config, watch, work / "trl", PEER.threads, seed, steps)
    points = zip(watch.times, watch.rewards, seen, strict=False)
    samples = config.buffer.batch_groups * config.buffer.group_size * len(watch.times)
    return {
        "mode": PEER.name,
        "seed": seed,
        "steps": len(watch.times),
        "samples": samples,
        "seconds": watch.times[-1],
        "samples_per_s": samples / watch.times[-1],
        "step_s": watch.times[-1] / len(watch.times),
        "curve": [{"s": round(s, 2), "reward": round(r, 4), **by} for s, r, by in points],
    }


def _umbra(work: Path, *arguments: str, environ: dict[str, str] | None = None) -> str:
    return _python(work, "-m", "umbra", *arguments, environ=environ)


def _python(work: Path, *arguments: str, environ: dict[str, str] | None = None) -> str:
    """Run it in `work`; what it printed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=work,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=BELOW_S,
        env=environ,
    ).stdout


def summarise(report: Report) -> None:
    """Times to the accuracy, rewards by environment, busy shares, ledgers."""
    ours = [row for row in report.rows if row["mode"] != PEER.name]
    target = common_accuracy(ours)
    report.figure("target", target)
    report.figure("parameters_m", report.facts["parameters"] / 1e6)
    report.figure("warm_steps", report.facts["warm"]["steps"])
    report.figure("steps", max(row["steps"] for row in ours))
    report.figure("samples", max(row["samples"] for row in ours))
    by_mode: dict[str, Rows] = {}
    for row in report.rows:
        by_mode[row["mode"]] = [*by_mode.get(row["mode"], []), row]
    own = {name: rows for name, rows in by_mode.items() if name != PEER.name}
    columns = [f"s to {target:g}", "steps to it", "steps", "s in all", "samples/s", "step s"]
    report.table(
        "runs",
        ["mode", "seeds", *columns, "held-out"],
        [_times(rows, target) for rows in by_mode.values()],
    )
    shares = ["generator", "trainer", "both at once", "of two cores", "CPU s a step"]
    agreement = ["staleness mean (max)", "k3", "k3 on equal weights", "ESS"]
    report.table("shares", ["mode", *shares, *agreement], [_shares(rows) for rows in own.values()])
    report.table(
        "environments",
        ["mode", *ENVIRONMENTS],
        [_by_environment(rows) for rows in by_mode.values()],
    )
    entries = ["issued", "trained", "ended", "in flight", "balance"]
    report.table("ledgers", ["mode", *entries], [_ledger(rows) for rows in own.values()])
    ahead = own.get(ASYNCHRONOUS.name)
    others = [own[mode.name] for mode in SYNCHRONOUS if mode.name in own]
    if ahead is None or not others:
        return
    same, peers = on_common_seeds(ahead, by_mode.get(PEER.name, []))
    if peers:
        _beside_trl(report, same, peers, target)
    ahead, *others = on_common_seeds(ahead, *others)
    seeds = {row["seed"] for row in ahead}
    if not seeds:
        return
    report.figure("compared_seeds", len(seeds))
    best = min(others, key=lambda rows: average(rows, "step_s"))
    step_s = average(ahead, "step_s")
    report.figure("better_synchronous", best[0]["mode"])
    report.figure("step_speed_up", average(best, "step_s") / step_s)
    report.figure("staleness", average(ahead, "staleness"))
    report.figure("k3_on_policy_most", max(row["k3_on_policy"] for row in ours))
    busy_s = mean(sum(row["cpu_s"].values()) / row["steps"] for row in ahead)
    work_s = max(busy_s / CORES, step_s * (1 - average(ahead, "trainer_idle")))
    report.figure("bound", average(best, "step_s") / work_s)
    # How much the later rewards differ tells whether staleness costs anything here.
    ends = [mean(_end(row, "reward") for row in rows) for rows in (ahead, best)]
    apart = ends[0] - ends[1]
    report.figure("reward_apart", apart)
    report.goal("reward at the end: asynchronous less synchronous", apart, ">=", -0.02)
    seconds = mean(reaching(row, target)[0] for row in ahead)
    slow = min(mean(reaching(row, target)[0] for row in rows) for rows in others)
    report.figure("over_the_better_synchronous", slow / seconds)
    report.goal(f"time to {target:g}, over the better synchronous", slow / seconds, ">=", 1.0)


def _beside_trl(report: Report, ahead: Rows, peers: Rows, target: float) -> None:
    rates = average(ahead, "samples_per_s"), average(peers, "samples_per_s")
    report.figure("samples_over_trl", rates[0] / rates[1])
    # What did not reach it would have taken longer than it was given.
    spent = mean(min(reaching(row, target)[0], row["seconds"]) for row in peers)
    ratio = spent / mean(reaching(row, target)[0] for row in ahead)
    report.figure("over_trl_at_least", ratio)
    report.goal(f"time to {target:g}, over TRL, at least", ratio, ">=", FASTER_THAN_TRL)


def on_common_seeds(*modes: Rows) -> list[Rows]:
    """The rows of the seeds that each mode has: the machine differs from hour to hour."""
    seeds = set.intersection(*({row["seed"] for row in rows} for rows in modes))
    return [[row for row in rows if row["seed"] in seeds] for rows in modes]


def average(rows: Rows, name: str) -> float:
    """Mean of a column."""
    return mean(row[name] for row in rows)


def common_accuracy(rows: Sequence[dict[str, Any]]) -> float:
    """The highest multiple of 1 / GRID that the rewards of all runs reach."""
    curves = [[step["reward"] for step in row["curve"]] for row in rows]
    tried = [n / GRID for n in range(GRID + 1)]
    return max(one for one in tried if all(reached(curve, one) for curve in curves))


def reaching(row: dict[str, Any], accuracy: float) -> tuple[float, int | None]:
    """Seconds and steps until a run has reached the accuracy; infinity if it has not."""
    step = reached([step["reward"] for step in row["curve"]], accuracy)
    return (math.inf, None) if step is None else (row["curve"][step - 1]["s"], step)


def _times(rows: Rows, accuracy: float) -> Sequence[Any]:
    found = [reaching(row, accuracy) for row in rows]
    steps = [step for _, step in found if step is not None]
    seconds = spread([one for one, step in found if step is not None], ".0f")
    if len(steps) < len(rows):
        seconds = f"reached by {len(steps)} of {len(rows)}"
    held = [mean(row["heldout"][at] for row in rows) for at in range(2)] if _ours(rows) else []
    return [
        rows[0]["mode"],
        len(rows),
        seconds,
        spread(steps, ".0f"),
        spread([row["steps"] for row in rows], ".0f"),
        spread([row["seconds"] for row in rows], ".0f"),
        spread([row["samples_per_s"] for row in rows], ".3g"),
        average(rows, "step_s"),
        " -> ".join(f"{share:.3f}" for share in held) or None,
    ]


def _ours(rows: Rows) -> bool:
    return "heldout" in rows[0]


def _shares(rows: Rows) -> Sequence[Any]:
    idle = average(rows, "generator_idle"), average(rows, "trainer_idle")
    used = mean(sum(row["cpu_s"].values()) / CORES / row["seconds"] for row in rows)
    shares = [1 - idle[0], 1 - idle[1], average(rows, "both_busy"), used]
    return [
        rows[0]["mode"],
        *(f"{share:.0%}" for share in shares),
        mean(sum(row["cpu_s"].values()) / row["steps"] for row in rows),
        f"{text(average(rows, 'staleness'))} ({max(row['staleness_max'] for row in rows):.0f})",
        f"{average(rows, 'k3'):.1e}",
        f"{max(row['k3_on_policy'] for row in rows):.1e}",
        f"{average(rows, 'ess'):.3f}",
    ]


def _by_environment(rows: Rows) -> Sequence[Any]:
    ends = [[mean(_end(row, one, at) for row in rows) for at in (ENDS, 0)] for one in ENVIRONMENTS]
    return [rows[0]["mode"], *(f"{begin:.2f} -> {end:.2f}" for begin, end in ends)]


def _end(row: dict[str, Any], name: str, first: int = 0) -> float:
    """Mean of a column of the curve, over the `first` steps or the last ENDS."""
    found = [step[name] for step in row["curve"] if name in step]
    return mean(found[:first] if first else found[-ENDS:])


def _ledger(rows: Rows) -> Sequence[Any]:
    ledgers = [row["ledger"] for row in rows]
    ended, flight = (
        sum(sum(ledger[name].values()) for ledger in ledgers) for name in ("ended", "in_flight")
    )
    sums = {name: sum(one[name] for one in ledgers) for name in ("issued", "trained")}
    apart = sum(abs(one["balance"]) for one in ledgers)
    counts = (sums["issued"], sums["trained"], ended, flight, apart)
    return [rows[0]["mode"], *(f"{count:,}" for count in counts)]


def main() -> int:
    """Run what is missing, print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="rows; continued if it exists")
    parser.add_argument("--work", type=Path, default=Path("runs/mixture"), help="model, runs")
    everything = [mode.name for mode in (*RUNS, PEER)]
    parser.add_argument("--modes", nargs="+", default=everything, choices=everything)
    parser.add_argument("--quick", action="store_true", help="a few steps of a tiny model")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--peer", type=int, metavar="SEED", help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = (args.work / ("quick" if args.quick else "whole")).resolve()
    if args.peer is not None:
        print(json.dumps(peer(work, args.peer, quick=args.quick)))
        return 0
    report = Report.begin("mixture", args.json)
    work.mkdir(parents=True, exist_ok=True)
    report.facts |= prepare(work, quick=args.quick)
    done = {(row["mode"], row["seed"]) for row in report.rows}
    wanted = [(mode, seed) for seed in args.seeds for mode in (*RUNS, PEER)]
    for mode, seed in wanted:
        if (mode.name, seed) in done or mode.name not in args.modes:
            continue
        began = time.monotonic()
        report.add(**learn(work, mode, seed, quick=args.quick))
        if args.json:
            report.write(args.json)
        print(f"{mode.name}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    sys.exit(main())
