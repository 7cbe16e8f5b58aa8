"""A whole run on one GPU: `umbra up` with a model of 0.4 B weights, every sample accounted for.

    python benchmarks/gpu_run.py [--plane cuda_ipc] [--engine vllm] [--kill] [--json FILE]
    python benchmarks/gpu_run.py --quick        a tiny model on the CPU over shared memory
    python benchmarks/gpu_run.py --check        begins nothing; on any machine

Generator and trainer share the GPU, in bf16, and every weight is pushed at each step over
`--plane`: a push over another one misses a goal, so that a fallback can't pass for the plane. The
model has random weights and is paid for answers of odd length: it shows what a push costs, and the
share of the GPU's rate that an update reaches. With `--kill` the generator is killed half way.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from chaos_audit import audit, rows
from chaos_run import DemoRun
from report import Report

from umbra.proto.deadline import Deadline
from umbra.services.config.loader import as_dict, load_config, to_toml
from umbra.services.generator.tasks import write_task
from umbra.services.trainer.make_model import make_model

DEMO = Path(__file__).resolve().parents[1] / "examples" / "sort.toml"
REWARD = "def odd(prompt, completion, row):\n    return float(len(completion) % 2)\n"
LARGE = {"hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "ff": 3072, "init_std": 0.02}
PARTS = ("snapshot_s", "wire_s", "stage_s", "commit_s", "total_s")  # of a push
END_S = 600.0
LOOK_S = 0.2
SETTINGS = (
    "model.path=model",
    "data.prompts=task/prompts.jsonl",
    "eval.prompts=",
    "environment.kind=reward",
    "environment.reward=reward:odd",
    "buffer.batch_groups=16",
    "trainer.learning_rate=1e-6",
)
ON_GPU = (
    "generator.device=cuda:0",
    "trainer.device=cuda:0",
    "trainer.precision=bf16",
    "weight_hub.dtype=bfloat16",
)
ENGINES = {
    "torch": ("generator.engine=torch",),
    "vllm": ("generator.engine=vllm", "generator.engine_args.gpu_memory_utilization=0.3"),
}


def settings(options: argparse.Namespace) -> list[str]:
    """Return the keys of the run that differ from the demo's."""
    own = (f"run.steps={options.steps}", f"weight_hub.plane={options.plane}")
    return [*SETTINGS, *(() if options.quick else ON_GPU), *ENGINES[options.engine], *own]


def one_run(home: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make model and task in `home`, and the run; what it came to."""
    weights = make_model(home / "model", **({} if options.quick else LARGE))
    write_task("sort", home / "task", seed=0, prompts=2048, heldout=16, demos=0)
    (home / "reward.py").write_text(REWARD, encoding="utf-8")
    config = as_dict(load_config(str(DEMO), overrides=settings(options)))
    (home / "run.toml").write_text(to_toml(config), encoding="utf-8")
    with closing(DemoRun(home, "", None)) as run:
        run.start()
        killed = options.kill and kill_half_way(run, options.steps)
        code = run.await_code(END_S)
        left = run.await_end(of_all=True)
        if code:
            print((run.home / "up.log").read_text(encoding="utf-8"), file=sys.stderr)
        found = audit(run.folder, run.notes)
        summary = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
        steps, pushes = list(rows(run.folder, "step")), list(rows(run.folder, "push"))
    return {
        "weights": weights,
        "plane": options.plane,
        "killed": killed,
        "restarts": sum(summary["restarts"].values()),
        "exit_code": code,
        "left": len(left),
        "lost": found.lost,
        "twice": found.twice,
        "out_of_balance": abs(summary["ledger"]["balance"]),
        "steps": summary["steps"],
        "updates": sum(step.get("skipped") == 0 for step in steps),
        "tokens_s": summary["tokens_per_s"] or 0.0,
        "pushes": len(pushes),
        "elsewhere": sum(push["plane"] != options.plane for push in pushes),
        "push_bytes": pushes[-1]["bytes"] if pushes else 0,
        **{f"push_{name}": median([push[name] for push in pushes]) for name in PARTS},
    }


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of the known values; None if there is none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def kill_half_way(run: DemoRun, steps: int) -> bool:
    """Kill the generator when half of the steps are trained; return whether there was one."""
    deadline = Deadline(END_S)
    while run.poll() is None and not deadline.passed:
        status = run.look()
        if status is not None and status.version >= steps // 2:
            return any(run.signal(name, signal.SIGKILL) for name in run.pids() if "gen" in name)
        time.sleep(LOOK_S)
    return False


def summarise(report: Report) -> None:
    """State the run's figures, and goals."""
    (run,) = report.rows
    shown = ("weights", "updates", "tokens_s", "pushes", "push_bytes")
    names = [*shown, *(f"push_{name}" for name in PARTS)]
    report.table("run", names, [[run[name] for name in names]])
    report.goal("exit code of the run", run["exit_code"], "<=", 0)
    report.goal("processes that outlived it", run["left"], "<=", 0)
    report.goal("acknowledged samples lost", run["lost"], "<=", 0)
    report.goal("samples trained twice", run["twice"], "<=", 0)
    report.goal("samples that the ledger lacks", run["out_of_balance"], "<=", 0)
    report.goal("updates", run["updates"], ">=", run["steps"])
    report.goal("pushes", run["pushes"], ">=", run["steps"])
    report.goal(f"pushes over another plane than {run['plane']}", run["elsewhere"], "<=", 0)
    if "killed" in report.facts:
        report.goal("restarts of the killed generator", run["restarts"], ">=", 1)


def main() -> int:
    """Run, print, and write JSON if asked to; 0 if all goals are met."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plane", choices=["cuda_ipc", "nccl", "shm", "tcp"])
    parser.add_argument("--engine", choices=ENGINES, default="torch")
    parser.add_argument("--kill", action="store_true", help="the generator, half way")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="a tiny model, on the CPU")
    parser.add_argument("--check", action="store_true", help="begin nothing")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.plane = options.plane or ("shm" if options.quick else "cuda_ipc")
    load_config(str(DEMO), overrides=settings(options))
    if options.check:
        return 0
    report = Report("gpu_run")
    with tempfile.TemporaryDirectory() as scratch:
        report.add(**one_run(Path(scratch).resolve(), options))
    if options.kill:
        report.facts["killed"] = True
    report.restate(summarise)
    return 0 if report.show(options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
