"""The quick form of every benchmark, one after the other: `make bench`.

    python benchmarks/quick.py [--out runs/bench] [NAME ...]

Small sizes and few passes: it shows that all of them run and what they print, and its figures are
rough. Those of the documents come from `published.py`. Results go to OUT as JSON. A missed goal is
reported; the exit code is 1 if a benchmark breaks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 600.0
FEW_RULES = ("--seeds", "0", "--tasks", "sort", "--rules", "ppo")
FEW = ("--seeds", "0", "--tasks", "guess", "--objectives", "ppo")
# Arguments that make it quick; "--quick" is that of whoever has it and is not named here.
QUICK: dict[str, tuple[str, ...]] = {
    "chaos": ("--minutes", "0.5", "--steps", "60"),
    "buffer_throughput": ("--seconds", "2", "--rounds", "1", "--only", "latency", "scale"),
    "generator_overhead": ("--engines", "torch", "--requests", "48", "--passes", "1"),
    "load_memory": ("--layers", "2", "--ranks", "1,2"),
    "logits_memory": ("--tokens", "1024", "2048", "--vocabularies", "32000"),
    "long_rows": ("--tokens", "512", "1024", "--width", "256", "--vocabulary", "8000"),
    "long_tail": ("--requests", "64", "--passes", "1"),
    "replay_fit": ("--steps", "16"),
    "revisions": ("HEAD", "--rounds", "1", "--parts", "loop"),
    "security_cost": ("--seconds", "2", "--size-mib", "32", "--rounds", "1"),
    "sequence_memory": ("--tokens", "1024", "--ranks", "1,2"),
    "snapshot_memory": ("--size-mib", "64", "--ranks", "1,2"),
    "staleness": (*FEW, "--staleness", "1", "--minibatches", "1"),
    "staleness_rules": (*FEW_RULES, "--minibatches", "1", "--lengths", "short"),
    "store": ("--records", "2000", "--rounds", "1"),
    "trainer_speed": ("--groups", "2", "--passes", "1", "--longest", "500", "--rows", "1024"),
}


def quick_forms() -> dict[str, tuple[str, ...]]:
    """Arguments of every benchmark that has a quick form, by name."""
    flagged = {
        path.stem: ("--quick",)
        for path in HERE.glob("*.py")
        if path != Path(__file__).resolve() and '"--quick"' in path.read_text(encoding="utf-8")
    }
    return dict(sorted((flagged | QUICK).items()))


def run(name: str, arguments: tuple[str, ...], out: Path) -> str:
    """Run it, its output going to ours; what became of it."""
    file = out / f"{name}.json"
    file.unlink(missing_ok=True)  # those that go on with a file would find their work done
    argv = [sys.executable, str(HERE / f"{name}.py"), *arguments, "--json", str(file)]
    try:
        code = subprocess.run(argv, timeout=LIMIT_S, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"BROKEN: not done within {LIMIT_S:g} s"
    if not file.exists():
        return f"BROKEN: exit code {code}, no results"
    return "done" if code == 0 else "done; a goal was missed"


def main() -> int:
    """All of them, or those that are named."""
    forms = quick_forms()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(forms))
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for results")
    args = parser.parse_args()
    if unknown := set(args.names) - set(forms):
        parser.error(f"no benchmark of that name: {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    ends: dict[str, str] = {}
    for name in args.names or forms:
        print(f"\n== {name} {' '.join(forms[name])}", flush=True)
        began = time.monotonic()
        ends[name] = run(name, forms[name], args.out)
        ends[name] += f" ({time.monotonic() - began:.0f} s)"
    print()
    for name, end in ends.items():
        print(f"{name}: {end}")
    return int(any(end.startswith("BROKEN") for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
