"""The data of run.toml: three datasets of reasoning-gym, as they are, with small parameters.

    python examples/reasoning-gym/prepare.py OUT

writes prompts and held-out prompts, each with the name of its environment, and worked examples
(the datasets' own answers) for the warm start.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from umbra.services.generator.tasks import write_task

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
    files: dict[str, list[list[str]]] = {}
    counts = {"prompts": prompts, "heldout": heldout, "demos": demos}
    with tempfile.TemporaryDirectory() as folder:
        for seed, (name, (dataset, parameters)) in enumerate(TASKS.items()):
            made = Path(folder) / name
            more = {"options": parameters, "environment": name}
            write_task(f"gym:{dataset}", made, seed=seed, **counts, **more)
            for file in made.iterdir():
                files.setdefault(file.name, []).append(file.read_text("utf-8").splitlines())
    out.mkdir(parents=True, exist_ok=True)
    for file, parts in files.items():
        rows = [row for rows in zip(*parts, strict=True) for row in rows]
        (out / file).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
