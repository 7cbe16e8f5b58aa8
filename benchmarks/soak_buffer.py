"""Kills the real buffer again and again under load: 300 times unless told otherwise.

    python benchmarks/soak_buffer.py [--kills 300] [--seed 0]

Fake generators and a fake trainer remember every ack; a violated promise ends it with an assertion.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fakes.crash_run import BufferProcess, CrashRun, check, check_kept


def main() -> None:
    """The soak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        buffer = BufferProcess(Path(folder))
        run = CrashRun(buffer, seed=args.seed)
        try:
            for _ in range(args.kills):
                run.work(chance.uniform(0.0, 0.2))
                buffer.kill()
                acked = len(run.acked)
                buffer.start()
                check_kept(run, acked)
            run.work(1.0)
            final = run.finish()
            check(run, final)
            print(
                f"{buffer.kills} kills in {time.monotonic() - began:.0f} s: {len(run.acked)} "
                f"acknowledged, {len(run.trained)} trained once, ledger {final.ledger}"
            )
        finally:
            run.close()
            buffer.close()


if __name__ == "__main__":
    main()
