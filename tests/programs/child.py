"""A child of a supervisor: it says that it is up, and ends in order by SIGTERM or with its parent.

Given a file it ignores SIGTERM, and so does a process that it starts, whose pid is written there.
"""

import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from umbra.services.process.parent import die_with_parent, tell_ready

SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def on_sigterm(_number: int, _frame: FrameType | None) -> None:
    print("draining", flush=True)
    sys.exit(0)


deaf = sys.argv[1:]
signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else on_sigterm)
die_with_parent()
for path in deaf:
    Path(path).write_text(str(subprocess.Popen([sys.executable, "-c", SLEEPER]).pid))
tell_ready({})
while True:
    signal.pause()
