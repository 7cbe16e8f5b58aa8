"""Tasks of other libraries as prompts files: `umbra make-task verifiers:ID`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from umbra.proto.errors import UsageError
from umbra.services.environments.python_apart import apart
from umbra.services.process.child import own_exit_code
from umbra.services.process.files import read_jsonl

VERIFIERS = "verifiers:"
_MODULE = "umbra.services.environments.kinds.task_rows"
_HELD_OUT_SHARE = 8  # at most one in so many of the tasks there are


def library_rows(
    task: str, count: int, seed: int, *, python: str = "", options: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Up to `count` rows of `task`, "verifiers:ID", made by the Python environment of `python`.

    Args:
        task: the environment or taskset.
        count: how many at most.
        seed: of the order, where there is an end of them.
        python: the program; empty = ours.
        options: as `environment.options`.

    Raises:
        UsageError: it can't be loaded, or has no tasks.
    """
    with tempfile.TemporaryDirectory(prefix="umbra-tasks-") as folder:
        file = Path(folder) / "rows.jsonl"
        given = (task.removeprefix(VERIFIERS), json.dumps(dict(options or {})))
        argv, environ = apart(python, _MODULE, *given, str(count), str(seed), str(file))
        ended = subprocess.run(argv, env=environ, stderr=subprocess.PIPE, text=True, check=False)
        if ended.returncode:
            last = ended.stderr.strip().rpartition("\n")[2]
            code = own_exit_code(ended.returncode)
            raise UsageError(last or f"{task}: its process ended with exit code {code}")
        return read_jsonl(file)


def divide(rows: list[Any], prompts: int, heldout: int) -> tuple[list[Any], list[Any]]:
    """`rows` as prompts and held-out prompts, which share none."""
    aside = min(heldout, len(rows) // _HELD_OUT_SHARE) if len(rows) < prompts + heldout else heldout
    held = rows[len(rows) - aside :]
    return rows[: min(prompts, len(rows) - aside)], held
