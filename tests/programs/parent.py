"""A supervisor that starts one `child.py` and waits; the test kills it.

Arguments: log file, how ("executed" or "forked").
"""

import sys
import time
from pathlib import Path

from umbra.services.process import fork_server
from umbra.services.process.child import ChildProcess, child_environ


def main() -> None:
    """Start the child, tell its pid once it is up, wait."""
    fork_server.MODULES = ("json",)
    forked = sys.argv[2] == "forked"
    child = ChildProcess(
        (sys.executable, str(Path(__file__).with_name("child.py"))),
        stdout=Path(sys.argv[1]),
        stderr=Path(sys.argv[1]),
        server=fork_server.ForkServer(child_environ()) if forked else None,
    )
    while child.ready() is None:
        time.sleep(0.01)
    print(child.pid, flush=True)
    while child.poll() is None:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
