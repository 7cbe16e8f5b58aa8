"""What `umbra simulate` predicts for 8 to 4,096 generators, and for what others have published.

    python benchmarks/scale.py --json FILE [--only generators modes ...] [--quick]

Nothing here is measured: every figure is simulated, from times that are stated below. FILE is
written after each simulation, and those that are in it are skipped.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from report import Report
from scale_tables import summarise

from umbra.deploy.simulator.compare import MODES, simulate
from umbra.deploy.simulator.scenario import Scenario, scenario_of

Tree = dict[str, dict[str, Any]]

# A model of about 7 B parameters that thinks at length, one GPU per engine. A decode step reads the
# weights (12 ms) and the cache of each sequence (0.1 ms); a GPU trains 5,000 tokens per second.
BASE: Tree = {
    "cluster": {"gpus": 0, "trainer_gpus": 0, "gpus_per_node": 8},
    "run": {"steps": 0},
    "buffer": {
        "group_size": 8, "batch_groups": 0, "run_ahead": 2, "max_staleness": 4,
        "lease_s": 600.0, "dead_after_s": 120.0,
    },
    "generator": {"slots": 16, "prefetch": 0, "partial_flush_tokens": 4096},
    "weight_hub": {"deadline_s": 600.0},
    "trainer": {"batch_wait_s": 5000.0},
    "speed": {
        "decode": {"step_s": 0.012, "token_s": 1e-4, "prompt_token_s": 3.5e-5, "pause_s": 0.3},
        "training": {"step_s": 1.0, "tokens_per_s": 5000.0, "snapshot_s": 0.2, "switch_s": 4.0},
        "network": {"weight_bytes": 15e9, "spread_s": 0.01},
        "broker": {},
    },
    "samples": {
        "prompt_tokens": 300,
        "lengths": {"kind": "lognormal", "median": 2000, "sigma": 1.0, "most": 16384},
    },
}  # fmt: skip
PER_GENERATOR = 8  # samples of a batch
GENERATORS = (8, 32, 128, 512, 1024, 2048, 4096)
STEPS = {8: 40, 32: 24, 128: 14, 512: 9, 4096: 7}  # more where chance is larger; else 8
LARGEST_COLOCATED = 512


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with `changes` at any depth; what has a kind is replaced as a whole."""
    result = dict(tree)
    for key, value in changes.items():
        deep = isinstance(value, dict) and isinstance(result.get(key), dict) and "kind" not in value
        result[key] = merged(result[key], value) if deep else value
    return result


def of_size(generators: int, **changes: Any) -> Scenario:
    """So many generators, a fourth as many GPUs that train, a batch in proportion."""
    trainers = max(1, generators // 4)
    sizes: Tree = {
        "cluster": {"gpus": generators + trainers, "trainer_gpus": trainers},
        "run": {"steps": STEPS.get(generators, 8)},
        "buffer": {"batch_groups": generators * PER_GENERATOR // 8},
    }
    return scenario_of(merged(merged(BASE, sizes), changes), "scale", Path())


def taking_turns(generators: int) -> Scenario:
    """The same GPUs in the synchronous mode, where all generate and then all train.

    An engine has the slots for its share of a batch and no more, because in this mode the first
    that has new weights takes as much as it has slots for.
    """
    gpus = generators + max(1, generators // 4)
    slots = -(-generators * PER_GENERATOR // gpus)
    return of_size(
        generators,
        cluster={"trainer_gpus": 0},
        run={"steps": min(6, STEPS.get(generators, 8))},
        buffer={"run_ahead": 0},
        generator={"slots": slots},
    )


def scaling() -> Iterator[tuple[str, Scenario]]:
    """Weak scaling: throughput, staleness, bubbles and the broker, by the number of generators."""
    for generators in GENERATORS:
        yield f"asynchronous/{generators}", of_size(generators)
        if generators <= LARGEST_COLOCATED:
            yield f"synchronous, all take turns/{generators}", taking_turns(generators)


def modes() -> Iterator[tuple[str, Scenario]]:
    """64 generators in every mode."""
    base = of_size(64, run={"steps": 16})
    for name, changes in MODES.items():
        if name == "synchronous, all take turns":
            yield name, taking_turns(64)
        elif name == "synchronous, fixed split":
            yield name, base.changed(**changes, generator={"slots": PER_GENERATOR})
        else:
            yield name, base.changed(**changes)


def splits() -> Iterator[tuple[str, Scenario]]:
    """80 GPUs, so many of which train."""
    for gpus in (8, 16, 24, 32, 40):
        yield f"{gpus}", of_size(64, run={"steps": 14}).changed(cluster={"trainer_gpus": gpus})


def failures() -> Iterator[tuple[str, Scenario]]:
    """64 generators of which each dies every so many hours, with and without flushed partials."""
    base = of_size(64, run={"steps": 40}, checkpoint={"every": 10})
    yield "none", base
    for hours in (8.0, 2.0, 0.5):
        failing = {"generator": {"mtbf_s": 3600 * hours, "recovery_s": 120.0}}
        for flush in (4096, 0):
            changes = {"failures": failing, "generator": {"partial_flush_tokens": flush}}
            name = f"a generator every {hours:g} h, {'flushed' if flush else 'not flushed'}"
            yield name, of_size(64, run={"steps": 40}, checkpoint={"every": 10}, **changes)
    for kind, mtbf_s, recovery_s in (("trainer", 1800.0, 120.0), ("buffer", 300.0, 10.0)):
        yield (
            f"the {kind} every {mtbf_s / 60:g} min",
            of_size(
                64,
                run={"steps": 40},
                checkpoint={"every": 10},
                failures={kind: {"mtbf_s": mtbf_s, "recovery_s": recovery_s}},
            ),
        )


# -- what others have published -------------------------------------------------------------------

# verl, docs/advance/fully_async.md: Qwen2.5-Math-7B on H20, 512 prompts of 16 samples a step, at
# most 28 K tokens. Seconds of a step by GPUs; training is update_actor, and old_log_prob where the
# synchronous mode computes it. The decode step and the lengths were chosen to fit `gen` of the
# synchronous runs; the times of the asynchronous runs are predictions.
VERL: dict[int, dict[str, float]] = {
    32: {"gen": 357.4, "training": 107.7 + 313.8, "step": 790.1, "async_training": 269.8,
         "async_step": 294.8},
    64: {"gen": 150.7, "training": 70.3 + 133.4, "step": 365.3, "async_training": 157.0,
         "async_step": 189.3},
    128: {"gen": 177.9, "training": 53.9 + 113.8, "step": 356.3, "async_training": 113.2,
          "async_step": 150.6},
}  # fmt: skip
VERL_BASE: Tree = {
    "run": {"steps": 7},
    "buffer": {"group_size": 16, "batch_groups": 512, "run_ahead": 1, "max_staleness": 2},
    "generator": {"kv_policy": "abort"},
    "speed": {
        "decode": {"step_s": 0.006, "token_s": 1.2e-4, "prompt_token_s": 1e-4, "pause_s": 1.0},
        "training": {"tokens_per_s": 0.0, "switch_s": 0.0},
    },
    "samples": {"lengths": {"kind": "lognormal", "median": 1200, "sigma": 1.2, "most": 28672}},
}


def verl() -> Iterator[tuple[str, Scenario]]:
    """Their colocated synchronous runs, and half of the GPUs for each role."""
    base = merged(BASE, VERL_BASE)
    for gpus, told in VERL.items():
        for name, trainers, seconds, ahead in (
            ("synchronous", 0, told["training"], 0),
            ("asynchronous", gpus // 2, told["async_training"], 1),
        ):
            changes: Tree = {
                "cluster": {"gpus": gpus, "trainer_gpus": trainers},
                "run": {"steps": 7 if ahead else 2},
                "buffer": {"run_ahead": ahead},
                "generator": {"slots": 8192 // gpus},  # alike: all of a batch on all GPUs
                "speed": {"training": {"step_s": seconds}},
            }
            yield f"{name}/{gpus}", scenario_of(merged(base, changes), "verl", Path())


# AReaL's paper, table 1: R1-Distill-Qwen-1.5B on 16 nodes of 8 H800, 1,000 steps; 512 prompts of 16
# samples, at most 27 K tokens, three fourths of the GPUs generate. They publish no times of the
# parts: the decode step (2.2 GB of weights), the lengths (mean about 7 K) and 33 % MFU are ours.
AREAL_HOURS = {"synchronous": 41.0, "asynchronous": 14.8}
AREAL_BASE: Tree = {
    "buffer": {"group_size": 16, "batch_groups": 512, "max_staleness": 5},
    "generator": {"kv_policy": "recompute"},
    "speed": {
        "decode": {"step_s": 0.0045, "token_s": 5e-5, "prompt_token_s": 8e-6, "pause_s": 0.5},
        "training": {"step_s": 3.0, "tokens_per_s": 36e3, "switch_s": 5.0},
        "network": {"weight_bytes": 3e9},
    },
    "samples": {"lengths": {"kind": "lognormal", "median": 5000, "sigma": 0.9, "most": 27648}},
}


def areal() -> Iterator[tuple[str, Scenario]]:
    """Their synchronous mode on all GPUs, and their asynchronous split."""
    base = merged(BASE, AREAL_BASE)
    for name, trainers, ahead, steps in (("synchronous", 0, 0, 2), ("asynchronous", 32, 4, 10)):
        changes: Tree = {
            "cluster": {"gpus": 128, "trainer_gpus": trainers},
            "run": {"steps": steps},
            "buffer": {"run_ahead": ahead},
            "generator": {"slots": 64},  # alike: all of a batch on all GPUs
        }
        yield name, scenario_of(merged(base, changes), "areal", Path())


# APR, verl-recipe PR 58: Qwen3-4B on 16 H20, 67 h 34 min without and 33 h 02 min with partials and
# supplementation; a few samples are very long ("e.g. 160 K tokens"). Batch and times are ours.
APR_BASE: Tree = {
    "cluster": {"gpus": 16, "trainer_gpus": 0},
    "run": {"steps": 16},
    "buffer": {"group_size": 8, "batch_groups": 64, "run_ahead": 0},
    "generator": {"slots": 32},
    "speed": {
        "decode": {"step_s": 0.008, "token_s": 2e-4},
        "training": {"step_s": 5.0, "tokens_per_s": 1500.0, "switch_s": 5.0},
        "network": {"weight_bytes": 8e9},
    },
    "samples": {
        "lengths": {"kind": "long-tail", "least": 500, "most": 6000, "longest": 40000,
                    "share": 0.02},
    },
}  # fmt: skip


def apr() -> Iterator[tuple[str, Scenario]]:
    """Taking turns; and the generation alone where a full batch interrupts the others.

    Theirs take turns too, so a step of the second takes the training time of the first more.
    """
    base = merged(BASE, APR_BASE)
    yield "synchronous", scenario_of(base, "apr", Path())
    partial: Tree = {
        "cluster": {"gpus": 17, "trainer_gpus": 1},
        "buffer": {"run_ahead": 1, "max_staleness": 8, "on_batch": "interrupt"},
        "speed": {"training": {"step_s": 0.0, "tokens_per_s": 0.0}},
    }
    yield "partials, generation alone", scenario_of(merged(base, partial), "apr", Path())


STUDIES = {
    "generators": scaling,
    "modes": modes,
    "splits": splits,
    "failures": failures,
    "verl": verl,
    "areal": areal,
    "apr": apr,
}


def main() -> int:
    """Simulate what is missing, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="rows; continued if it exists")
    parser.add_argument("--only", nargs="+", choices=list(STUDIES), default=list(STUDIES))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case later")
    parser.add_argument("--quick", action="store_true", help="at most 128 generators")
    args = parser.parse_args()
    report = Report.begin("scale (simulated)", args.json)
    start = time.monotonic()
    done = {(row["study"], row["case"]) for row in report.rows}
    for study in ["generators", "splits"] if args.quick else args.only:
        for case, scenario in STUDIES[study]():
            if (study, case) in done or (args.quick and scenario.generators > 160):
                continue
            began = time.monotonic()
            if began - start > 60 * args.minutes:
                return 0
            one = simulate(scenario)
            wall_s = time.monotonic() - began
            report.add(study=study, case=case, wall_s=wall_s, **msgspec.to_builtins(one))
            print(f"{study}/{case}: {one.samples_per_s:,.1f} samples/s, {one.step_s:,.1f} s a step")
            sys.stdout.flush()
            if args.json:
                report.write(args.json)
    report.restate(summarise)
    report.show(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
