"""A child of a supervisor that behaves as its environment says.

CHILD_READY         say so on the ready pipe, as a service does
CHILD_DEAF=1        ignore SIGTERM
CHILD_EXIT_FIFO=f   end with the code that is written to the FIFO `f`
CHILD_GRANDCHILD=f  start a process that ignores SIGTERM, and write its pid to `f`
CHILD_PARENT=1      end with the parent, by the runtime's die_with_parent
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def on_sigterm(_number: int, _frame: FrameType | None) -> None:
    print("draining", flush=True)
    sys.exit(0)


def main() -> int:
    deaf = "CHILD_DEAF" in os.environ
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else on_sigterm)
    if "CHILD_PARENT" in os.environ:
        from umbra.services.process.parent import die_with_parent

        die_with_parent()
    if path := os.environ.get("CHILD_GRANDCHILD"):
        grandchild = subprocess.Popen([sys.executable, "-c", SLEEPER])
        Path(path).write_text(str(grandchild.pid), encoding="ascii")
    if ready := os.environ.get("CHILD_READY"):
        line = json.dumps({"broker": ready, "pid": os.getpid()}) + "\n"
        os.write(int(os.environ["UMBRA_READY_FD"]), line.encode())
    if fifo := os.environ.get("CHILD_EXIT_FIFO"):
        return int(Path(fifo).read_text(encoding="ascii"))
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
