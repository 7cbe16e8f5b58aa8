"""Writes the tasks of another library as prompt rows, in the Python environment that has it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from umbra.proto.errors import UmbraError
from umbra.services.environments.kinds.verifiers import verifiers_rows


def main(name: str, options: str, count: str, seed: str, out: str) -> None:
    """Write up to `count` rows of verifiers' `name` to the file `out`, one JSON object a line."""
    sys.path.append(os.getcwd())
    try:
        rows = verifiers_rows(name, json.loads(options), int(count), int(seed))
        lines = [json.dumps(row) for row in rows]
    except UmbraError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except TypeError as error:
        print(f"verifiers:{name}: a task can't be written as JSON: {error}", file=sys.stderr)
        sys.exit(2)
    Path(out).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
