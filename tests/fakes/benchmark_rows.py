"""Rows as the benchmarks make them, so that their tables and figures can be tried without a run."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

RUN: Row = {
    "samples_per_s": 1.0, "tokens_per_s": 1.0, "step_s": 2.0, "generator_idle": 0.1,
    "trainer_idle": 0.2, "buffer_idle": 0.3, "hub_idle": 0.4, "staleness": 1.0,
    "staleness_max": 2.0, "utilisation": 0.9, "dropped": 0, "total_ms": 1.0, "wire_mb": 1.0,
    "one_slot_wait_ms": 0.0,
}  # fmt: skip
WORLD: Row = {
    name: 1.0
    for name in (
        "per_s", "buffer_us", "buffer_core", "hub_core", "ack_p50_ms", "ack_p99_ms",
        "lease_p50_ms", "lease_p99_ms", "fairness", "buffer_mb", "hub_mb", "pushes_per_s",
        "refused",
    )
}  # fmt: skip
LOADED: Row = {
    "members": 64, "per_s": 500.0, "refused": 0, "unanswered": 0, "late": 0, "ack_p50_ms": 1.0,
    "ack_p99_ms": 2.0, "lease_p99_ms": 2.0, "trained_per_s": 500.0, "beats_per_s": 64.0,
    "cpu_share": 0.1, "buffer_us": 100.0, "loop_us": 80.0, "loop_share": 0.1, "buffer_mb": 70.0,
}  # fmt: skip
TRIED: Row = {"measured": 70.0, "predicted": 71.0, "staleness": 1.0, "predicted_staleness": 1.0}
SIZED: Row = {
    "system": "verl", "told_s": 0.0, "told_ratio": 0.0, "over": "", "blind": True, "step_s": 9.0,
    "trainer": {"train": 0.5}, "slots": 0.5, "staleness": 1.0, "gpus": 16,
}  # fmt: skip
VANISHED: Row = {
    "given_up_s": 15.0, "held": 10, "taken_back": 10, "acknowledged": 99, "lost": 0, "twice": 0,
    "rate_of_the_others": 1.0, "rate_again": 1.0,
}  # fmt: skip
ROUND: Row = {
    "seconds": 2.0, "disturbed_s": 1.0, "lives": 1, "acts": [], "overtaken": {},
    "curve": [0.5] * 10,
    "audit": {"acknowledged": 1, "trained": 1, "untrained": 0, "lost": 0, "twice": 0, "ended": {},
              "repeated": 0, "changed": 0, "steps": [1]},
}  # fmt: skip
DEED: Row = {
    "row": "deed", "role": "generator", "what": "connections", "server": "buffer", "frames": 1,
    "bytes": 1, "answers": {"malformed": 1}, "beyond": 0, "memory": [1, 2, 1], "wait_s": 0.1,
}  # fmt: skip
ATTACKED: Row = {
    "row": "run", "seconds": 60.0, "many": 10, "steps_meanwhile": 9, "services_ended": 0,
    "longest_pause_s": 1.0,
    "exit_code": 0, "unanswered": 0, "waits": {"buffer": 0.1}, "asked": 9, "acknowledged": 9,
    "trained": 9, "lost": 0, "twice": 0, "out_of_balance": 0, "counters": {},
    "levels": {"buffer": [1, 1]},
}  # fmt: skip
ACT: Row = {"kind": "kill", "service": "buffer", "name": "buffer", "at": 0.0, "recovered_s": 1.0}
PUSH: Row = {
    name: 1.0
    for name in ("push_s", "best_s", "snapshot_s", "commit_s", "cast_floor_s", "copy_floor_s",
                 "load_floor_s", "wire_bytes", "changed", "nbytes")
}  # fmt: skip
DEMO: Row = {
    "accuracy_before": 0.2, "accuracy_after": 0.9, "greedy_after": 1.0, "steps": 9, "samples": 99,
    "pushes": 10, "loop_s": 1.0, "demo_s": 2.0, "staleness": 1.0, "staleness_max": 2.0,
    "generator_idle": 0.1, "trainer_idle": 0.2, "k3": 1e-12, "mixed": 0.2,
    "push_s": {"snapshot": 1.0, "wire": 1.0, "stage": 1.0, "commit": 1.0, "total": 4.0},
    "cpu_s": [1.0, 1.0, 1.0, 1.0],
}  # fmt: skip
STORE: Row = {
    name: 1.0
    for name in ("per_s", "cpu_us", "commit_p50_ms", "commit_p99_ms", "write_amplification")
}
LOOP: Row = {
    name: 1.0 for name in ("bare_tok_s", "loop_tok_s", "ratio", "best_ratio", "new_weights_ms")
}
PREDICTED: Row = {
    "seeds": 3, "measured": 1.0, "predicted": 1.0, "error_percent": 1.0, "staleness": 1.0,
    "predicted_staleness": 1.0, "trainer_idle": 0.1, "predicted_idle": 0.1,
}  # fmt: skip
CURVE = [[n, n / 20] for n in range(20)]
REAL: Row = RUN | {
    "form": "real", "mix": "sort", "to_accuracy_s": 9.0, "to_accuracy_steps": 9,
    "final_reward": 0.9, "generation_s": 1.0, "training_s": 0.5, "steps": 9, "cpu_s": {"all": 9.0},
    "curve": CURVE,
}  # fmt: skip
MIXED: Row = {
    "seconds": 9.0, "samples_per_s": 1.0, "step_s": 1.0, "generator_idle": 0.1,
    "trainer_idle": 0.2, "both_busy": 0.7, "staleness": 1.0, "staleness_max": 2.0, "k3": 1e-3,
    "k3_on_policy": 1e-12, "ess": 0.9, "cpu_s": {"all": 9.0}, "steps": 20, "samples": 99,
    "heldout": [0.3, 0.8],
    "ledger": {"issued": 9, "trained": 9, "ended": {}, "in_flight": {}, "balance": 0},
}  # fmt: skip
TRL = {name: value for name, value in REAL.items() if "idle" not in name and name != "cpu_s"}


def rows_of(name: str, load: Any) -> tuple[list[Row], Row]:
    """Rows and facts of the publication called `name`; `load` imports a module of benchmarks/."""
    match name:
        case "demo_runs":
            return [DEMO | {"task": task, "seed": 0} for task in ("sort", "guess")], {}
        case "long_tail":
            speeds = {"tokens_per_s": 2.0, "slowest_pass": 1.0}
            engines, mixes = load("long_tail").ENGINES, load("long_tail").GOALS
            return [speeds | {"load": mix, "engine": e} for mix in mixes for e in engines], {}
        case "weight_push":
            push = load("weight_push")
            return [
                PUSH
                | {"part": form.part, "method": form.method, "link": form.link, "pushes": 5}
                | {"receivers": form.count, "relays": len(form.relays.above) if form.relays else 0}
                for form in push.forms(push.parse([]))
            ], {}
        case "buffer_throughput":
            peers, ours = load("peers"), load("buffer_throughput").OURS
            rates = {"part": "transports", "per_s": [1.0], "cpu_s_per_1k": [1.0]}
            latency = {"part": "latency", "per_s": 1.0, "p50_ms": 1.0, "p99_ms": 1.0}
            memory = {"mb": 1.0, "more_mb": 1.0, "disk_mb": 1.0, "many_mb": 1.0}
            names = (ours, peers.CEILING, *peers.BATCHES)
            return [
                *(rates | {"what": one} for one in names),
                *(latency | {"what": one} for one in ("acknowledgement", "trainer")),
                *({"part": "scale", "what": one, "buffer_us": [1.0]} for one in ("4", "512")),
                {"part": "memory", "what": "100", **memory},
            ], {}
        case "end_to_end_replay":
            cells = load("replay_cells")
            return [
                RUN | {"form": "replay", "mix": mix, "mode": mode.name, "seed": 0}
                for mix in cells.MIXES
                for mode in cells.MODES
            ], {}
        case "end_to_end_real":
            cells = load("demo_cells")
            ours = [REAL | {"mode": mode.name, "seed": 0} for mode in cells.MODES]
            return ours + [TRL | {"mode": mode.name, "seed": 0} for mode in cells.TRL_MODES], {}
        case "mixture":
            mixture = load("mixture")
            values = ("reward", "staleness", "k3", *mixture.ENVIRONMENTS)
            curve = [{"s": float(n)} | dict.fromkeys(values, n / 20) for n in range(20)]
            modes = (*mixture.RUNS, mixture.PEER)
            rows = [MIXED | {"mode": mode.name, "seed": 0, "curve": curve} for mode in modes]
            return rows, {"warm": {"steps": 9}, "parameters": 9_000_000}
        case "ablations":
            parts = load("ablations").PARTS
            return [RUN | {"block": p.block, "name": p.name, "seed": 0} for p in parts], {}
        case "chaos":
            calm = ROUND | {"round": load("chaos").CALM}
            return [calm, ROUND | {"round": "round-1", "acts": [ACT]}], {}
        case "hostile":
            return [DEED, DEED | {"what": "Ping"}, ATTACKED], {}
        case "broker_scale":
            return [WORLD | {"what": "10 generators", "generators": 10}], VANISHED
        case "search_check":
            turns = load("search_check").TURNS
            ways = [("4 GPUs train", True), (str(turns), False)]
            return [TRIED | {"way": way, "chosen": chosen} for way, chosen in ways], {"tried": 11}
        case "published_sizes":
            told = [{"told_s": 10.0, "what": "a"}, {"told_ratio": 2.0, "over": "a", "what": "b"}]
            return [SIZED | one for one in told], {}
        case "buffer_load":
            return [LOADED | {"rate": rate} for rate in (500.0, 0.0)], {"trajectory_bytes": 9000.0}
        case "generator_overhead":
            return [LOOP | {"engine": engine} for engine in ("vllm", "torch")], {}
        case "store":
            return [STORE | {"store": store} for store in ("append log", "sqlite")], {}
        case "security_cost":
            return [
                {"what": f"{n}", "plain": 1.0, "CURVE": 2.0, "ratio": 2.0} for n in range(11)
            ], {}
        case "snapshot_memory":
            methods = load("snapshot_memory").METHODS
            return [
                {"ranks": 1, "method": method, "shard_mib": 1.0, "extra_mib": 1.0}
                for method in methods
            ], {"bucket_mib": 4}
        case "replay_fit":
            rows = [{"engine": e, "tokens": 9, "seconds": 1.0} for e in ("torch", "replay")]
            return rows, {"fit_error": 0.01}
        case "load_memory":
            sizes = {f"{name}_mib": 1.0 for name in ("peak", "share", "whole", "layer")}
            case = sizes | {"kind": "dense", "ranks": 2}
            return [case | {"method": method} for method in load("load_memory").METHODS], {}
        case "logits_memory":
            sizes = {"mib": 1.0, "whole_gib": 1.0, "seconds": 1.0, "vocabulary": 32000}
            case = sizes | {"method": "in chunks"}
            return [case | {"tokens": 1024}, case | {"tokens": 2048}], {}
        case "sequence_memory":
            case = {"tokens": 1024, "mib": 1.0, "seconds": 1.0}
            return [case | {"ranks": 1}, case | {"ranks": 2}], {}
        case "long_rows":
            sizes = {"gib": 1.0, "seconds": 1.0, "tokens_s": 1.0, "width": 64, "vocabulary": 8000}
            return [sizes | {"tokens": 1024}, sizes | {"tokens": 2048}], {}
        case "router_replay":
            found = dict.fromkeys(load("router_replay").COLUMNS, 1.0)
            run = found | {"seed": 0, "first": 0.1, "reward": 0.2, "seconds": 1.0}
            return [
                run | {"lag": lag, "replay": replay} for lag in (0, 4) for replay in (False, True)
            ], {"steps": 1, "rate": 1.0}
        case "revisions":
            cost = {"what": "a push", "unit": "s", "cost": 1.0, "round": 0}
            return [cost | {"side": side} for side in ("before", "after")], {}
        case "simulator":
            facts = {"commit_s": 0.01, "snapshot_s": 0.01, "spread_s": 0.01}
            return [PREDICTED | {"mix": "uniform", "mode": "async"}], facts
        case "trainer_speed":
            speed = load("trainer_speed")
            who = (speed.OURS, speed.UNSHARED, speed.PLAIN, speed.PADDED, speed.TRL)
            loads = ("long tail", "long prompts")
            spent = {"seconds": 1.0, "tokens_s": 1.0}
            updates = [spent | {"load": one, "who": name} for one in loads for name in who]
            return [*updates, spent | {"row": 2048, "who": speed.OURS, "mib": 1.0}], {}
        case _:
            raise LookupError(name)
