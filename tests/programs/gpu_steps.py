"""Updates of each recipe on a GPU that is not there: `python gpu_steps.py LIBRARY RECIPE...`.

Prints a line of JSON for each: what was found, or what was raised. `LIBRARY` is `one_gpu.cpp`.
"""

from __future__ import annotations

import ctypes
import json
import sys
import traceback

ctypes.CDLL(sys.argv[1])  # before torch

from fakes.gpu_recipes import run  # noqa: E402

for recipe in sys.argv[2:]:
    try:
        found = run(recipe)
    except Exception:  # noqa: BLE001 - the test shows it
        found = {"raised": traceback.format_exc()}
    print(json.dumps(found), flush=True)
