"""Updates of each recipe on a GPU that is not there: `python gpu_steps.py LIBRARY MODEL RECIPE...`.

Prints a line of JSON for each: what was found, or what was raised. `LIBRARY` is `one_gpu.cpp`; a
small model is made in the folder `MODEL`.
"""

from __future__ import annotations

import ctypes
import json
import sys
import traceback
from pathlib import Path

ctypes.CDLL(sys.argv[1])  # before torch

from fakes.gpu_recipes import run  # noqa: E402

for recipe in sys.argv[3:]:
    try:
        found = run(recipe, Path(sys.argv[2]))
    except Exception:  # noqa: BLE001 - the test shows it
        found = {"raised": traceback.format_exc()}
    print(json.dumps(found), flush=True)
