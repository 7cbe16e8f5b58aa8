"""`umbra` whose generator's engine hangs.

    python -P hanging_up.py PLAN up RUN ...

PLAN is a file with a way per line. Each life of the generator takes the first line away and hangs
so, once:

    blocks    a step never comes back
    holds     nor does it let other threads of Python run
    loads     new weights are never loaded
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from typing import Any

from fakes.injected import run

from umbra.services.generator.engines.torch_engine import TorchEngine

TOKENS = 200  # before it hangs


def prepare(file: Path) -> None:
    poll, load = TorchEngine.poll, TorchEngine.load
    hanging: list[str] = []  # one way at most
    lock = threading.Lock()

    def hangs(engine: TorchEngine, *kinds: str) -> str:
        with lock:
            late = engine.decoded_tokens > TOKENS and not hanging
            lines = file.read_text().splitlines() if late else []
            if lines and lines[0] in kinds:
                hanging.append(lines[0])
                file.write_text("\n".join(lines[1:]))
            return next((kind for kind in hanging if kind in kinds), "")

    def polling(self: TorchEngine, timeout_s: float = 0.0) -> Any:
        kind = hangs(self, "blocks", "holds") if self.busy else ""
        if kind == "blocks":
            threading.Event().wait()
        elif kind == "holds":
            ctypes.PyDLL(None).pause()
        return poll(self, timeout_s)

    def loading(self: TorchEngine, *given: Any) -> Any:
        if hangs(self, "loads"):
            threading.Event().wait()
        return load(self, *given)

    TorchEngine.poll = polling
    TorchEngine.load = loading  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    plan = Path(sys.argv.pop(1))
    run("generator", lambda: prepare(plan))
