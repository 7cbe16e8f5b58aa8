"""The measurements that the documents show, and how each is made.

    python benchmarks/published.py --list                what there is, and what is outstanding
    python benchmarks/published.py [--minutes M]         make what is outstanding, in this order
    python benchmarks/published.py [NAME ...]            make these, anew where there is a file

One after the other, for the machine should have nothing else to do. Each writes
`benchmarks/results/NAME.json`; when all are done the documents are rendered from the files. What
was broken off is in `runs/published` and is gone on with where the script can. A file is of the
code of its day: after a change that concerns it, make it anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
UNDER_WAY = Path("runs/published")


@dataclass(frozen=True)
class Publication:
    """How a file of results is made.

    Attributes:
        script: here, without its ending.
        arguments: those of its published form, but for `--json`.
        minutes: about how long it takes on two cores with nothing else on them.
        needs: what it measures against and this project does not install.
    """

    script: str
    arguments: tuple[str, ...]
    minutes: float
    needs: str = ""


# What README shows and what is quick come first.
PUBLISHED: dict[str, Publication] = {
    "demo_runs": Publication("demo_runs", (), 9),
    "whole_machine": Publication("whole_machine", (), 10),
    "long_tail": Publication("long_tail", ("--passes", "3"), 4),
    "weight_push": Publication("weight_push", (), 12, "root's rights (shaped links)"),
    "buffer_throughput": Publication(
        "buffer_throughput", ("--ray", "--seconds", "6"), 6, "redis-server, redis, ray"
    ),
    "trainer_speed": Publication("trainer_speed", ("--groups", "3"), 12),
    "end_to_end_replay": Publication("end_to_end", ("--form", "replay", "--jobs", "3"), 16),
    "simulator": Publication("simulator", (), 3),  # predicts the runs above
    "search_check": Publication("search_check", (), 9),
    "end_to_end_real": Publication("end_to_end", ("--form", "real", "trl"), 24),
    "ablations": Publication("ablations", ("--jobs", "3"), 8),
    "chaos": Publication("chaos", ("--every", "1.5", "--seed", "7"), 16),
    "hostile": Publication("hostile", (), 13),
    "broker_scale": Publication("broker_scale", ("--generators", "1000"), 6),
    "buffer_load": Publication("buffer_load", (), 7),
    "generator_overhead": Publication("generator_overhead", ("--passes", "3"), 6, "vLLM"),
    "store": Publication("store", (), 2, "lmdb"),
    "snapshot_memory": Publication("snapshot_memory", (), 1),
    "load_memory": Publication("load_memory", (), 3),
    "logits_memory": Publication("logits_memory", (), 5),
    "sequence_memory": Publication("sequence_memory", (), 1),
    "long_rows": Publication("long_rows", (), 15),
    "worked_examples": Publication("worked_examples", (), 10),
    "mixture": Publication("mixture", (), 30),
    "router_replay": Publication("router_replay", (), 8),
    "security_cost": Publication("security_cost", (), 3),
    "push_at_size": Publication("push_at_size", (), 1),  # of weight_push and security_cost
    "replay_fit": Publication("replay_fit", (), 3),
    "revisions": Publication("revisions", ("362ebf4",), 20),  # before the rooms and what followed
    "scale": Publication("scale", (), 10),
    "published_sizes": Publication("published_sizes", (), 8),
    "staleness_rules": Publication("staleness_rules", ("--jobs", "2"), 90),
    "staleness": Publication("staleness", ("--jobs", "2"), 120),
}


def file_of(name: str) -> Path:
    """Where the results called `name` are."""
    return RESULTS / f"{name}.json"


def make(name: str) -> bool:
    """Run it; whether there are new results."""
    one, made = PUBLISHED[name], UNDER_WAY / f"{name}.json"
    argv = [sys.executable, str(HERE / f"{one.script}.py"), *one.arguments, "--json", str(made)]
    code = subprocess.run(argv, check=False).returncode
    # 1: a goal was missed, or Python ended by an exception, and then there is no summary.
    if code not in (0, 1) or not made.exists() or not json.loads(made.read_bytes())["tables"]:
        print(f"{name}: BROKEN, exit code {code}", flush=True)
        return False
    file_of(name).write_bytes(made.read_bytes())
    made.unlink()
    return True


def main() -> int:
    """Make what is wanted, then render the documents."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--list", action="store_true", help="print them and make none")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin none that takes longer")
    args = parser.parse_args()
    if unknown := set(args.names) - set(PUBLISHED):
        parser.error(f"nothing of that name is published: {', '.join(sorted(unknown))}")
    if args.list:
        for name, one in PUBLISHED.items():
            state = "there" if file_of(name).exists() else "outstanding"
            needs = f"  needs {one.needs}" if one.needs else ""
            print(f"{name:20}{state:13}{one.minutes:4.0f} min{needs}")
        return 0
    wanted = args.names or [name for name in PUBLISHED if not file_of(name).exists()]
    print(f"about {sum(PUBLISHED[name].minutes for name in wanted):.0f} minutes in all", flush=True)
    until, broken = time.monotonic() + 60 * args.minutes, list[str]()
    for name in wanted:
        if time.monotonic() + 60 * PUBLISHED[name].minutes > until:
            print(f"{name}: left for another call")
            continue
        began = time.monotonic()
        print(f"\n== {name}, about {PUBLISHED[name].minutes:.0f} min", flush=True)
        if not make(name):
            broken.append(name)
        print(f"{name}: {(time.monotonic() - began) / 60:.1f} min", flush=True)
    subprocess.run([sys.executable, str(HERE / "render.py")], check=True)
    print(f"broken: {', '.join(broken)}" if broken else "")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
