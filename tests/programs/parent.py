"""A supervisor that starts one `child.py` and waits; the test kills it. Argument: log file."""

import sys
import time
from pathlib import Path

from umbra.services.process.child import ChildProcess


def main() -> None:
    """Start the child, tell its pid once it is up, wait."""
    child = ChildProcess(
        (sys.executable, str(Path(__file__).with_name("child.py"))),
        stdout=Path(sys.argv[1]),
        stderr=Path(sys.argv[1]),
    )
    while child.ready() is None:
        time.sleep(0.01)
    print(child.pid, flush=True)
    while child.poll() is None:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
