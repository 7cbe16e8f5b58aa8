"""Fuzzing guided by coverage, with atheris, over all decoders (`fuzz_targets.py`).

    python tools/fuzz.py --minutes 30       # `make fuzz`
    python tools/fuzz.py --input FILE       # one input again, with its traceback

Inputs that reach new lines are kept in OUT/corpus, from where the next run goes on. What breaks a
promise goes to OUT/findings, once for each place that it was raised from; OUT/summary.json says how
much was tried. The exit code is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import random
import re
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MAX_LEN = 4096
SLOW_S = 120  # of wall-clock time: the machine may be busy, and the fuzzer is nice
RSS_MB = 4096
COVERAGE = re.compile(r"#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+)")


def find(out: Path, minutes: float) -> None:
    """Fuzz, in this process, which libFuzzer ends."""
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["umbra"]):
        targets = importlib.import_module("fuzz_targets")
        inputs = importlib.import_module("fuzz_seeds")
    logging.disable()
    corpus, findings = out / "corpus", out / "findings"
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    for one in inputs.seeds():
        (corpus / hashlib.sha1(one, usedforsecurity=False).hexdigest()).write_bytes(one)
    tried: Counter[str] = Counter()
    places: Counter[str] = Counter()

    def once(data: bytes) -> None:
        name = targets.TARGETS[data[0] % len(targets.TARGETS)].__name__ if data else "none"
        tried[name] += 1
        try:
            targets.try_input(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{name}: {type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"
            places[place] += 1
            if places[place] == 1:
                kept = re.sub(r"\W+", "-", place)
                (findings / kept).write_bytes(data)
                (findings / f"{kept}.txt").write_text(traceback.format_exc(), encoding="utf-8")
        if sum(tried.values()) % 1000 == 0:
            note = {"executions": dict(tried), "findings": dict(places)}
            (out / "counts.json").write_text(json.dumps(note), encoding="utf-8")

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        made = inputs.change(data, chance) if chance.random() < 0.7 else None
        return atheris.Mutate(data, most) if made is None or len(made) > most else made

    options = (
        f"-max_total_time={round(60 * minutes)}", f"-max_len={MAX_LEN}", f"-timeout={SLOW_S}",
        f"-rss_limit_mb={RSS_MB}", f"-artifact_prefix={findings}/", "-print_final_stats=1",
    )  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], once, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> int:
    """Run the fuzzer and tell what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--input", type=Path, metavar="FILE", help="try this one alone")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path += [str(ROOT / "tests"), str(ROOT / "src"), str(Path(__file__).parent)]
    if options.input is not None:
        print(importlib.import_module("fuzz_targets").try_input(options.input.read_bytes()))
        return 0
    if options.inside:
        find(options.out, options.minutes)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    began, coverage = time.monotonic(), (0, 0)
    argv = [sys.executable, __file__, "--inside", "--out", str(options.out)]
    child = subprocess.Popen(
        [*argv, "--minutes", str(options.minutes)], stderr=subprocess.PIPE, text=True,
        errors="replace",
    )  # fmt: skip
    assert child.stderr is not None
    with (options.out / "libfuzzer.log").open("w", encoding="utf-8") as log:
        for line in child.stderr:
            log.write(line)
            if seen := COVERAGE.search(line):
                coverage = (int(seen[2]), int(seen[3]))
    code = child.wait()
    counts = json.loads((options.out / "counts.json").read_text(encoding="utf-8"))
    summary = {
        "date": time.strftime("%Y-%m-%d"),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "executions": sum(counts["executions"].values()),
        "by_target": counts["executions"],
        "covered_edges": coverage[0],
        "features": coverage[1],
        "corpus": len(list((options.out / "corpus").iterdir())),
        "findings": counts["findings"],
        "ended_by": code,
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    return int(bool(counts["findings"]) or code != 0)


if __name__ == "__main__":
    sys.exit(main())
