"""The data of run.toml: three datasets of reasoning-gym, as they are, with small parameters.

    python examples/reasoning-gym/prepare.py OUT

writes prompts and held-out prompts, each with the name of its environment, and worked examples
(the datasets' own answers) for the warm start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from umbra.services.environments.built_in import gym_rows

# By the name of the environment: the dataset, and its parameters.
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "sums": (
        "basic_arithmetic",
        {"min_terms": 2, "max_terms": 2, "max_digits": 2, "operators": ["+", "-"]}
        | {"allow_parentheses": False, "allow_negation": False},
    ),
    "spelling": ("spell_backward", {"max_word_len": 7}),
    "equations": ("simple_equations", {"max_terms": 2, "max_value": 10}),
}
PROMPTS, HELDOUT, DEMOS = 8192, 256, 8192  # of each


def write(out: Path, prompts: int = PROMPTS, heldout: int = HELDOUT, demos: int = DEMOS) -> None:
    """Everything that the example needs, the same each time; rows of the datasets take turns."""
    count = prompts + heldout + demos
    made = [
        [{"environment": name, **row} for row in gym_rows(dataset, count, seed, parameters)]
        for seed, (name, (dataset, parameters)) in enumerate(TASKS.items())
    ]
    rows = [row for turn in zip(*made, strict=True) for row in turn]
    first, last = len(TASKS) * prompts, len(TASKS) * (prompts + heldout)
    files = {"prompts": rows[:first], "heldout": rows[first:last]}
    files["demos"] = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in rows[last:]
    ]
    out.mkdir(parents=True, exist_ok=True)
    for file, written in files.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in written)
        (out / f"{file}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
