"""`umbra` whose trainer is killed at chosen moments.

    python -P killed_up.py PLAN up RUN ...

PLAN is a file with a moment and a step per line. Each life of the trainer takes the first line away
and ends by SIGKILL there:

    trained 5      step 5 has been trained, and is not committed
    committed 8    step 8 is committed, and its checkpoint is not begun
    writing 8      half of a file of the checkpoint of step 8 is on the disk
    written 8      all its files are there, and it has no name
    named 8        it has its name, and the buffer does not know

So that there are such moments on the slowest disk, no checkpoint is put off in any life: training
waits for the one before.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from fakes.injected import run

from umbra.deploy.run import up
from umbra.proto.messages import CommitBatch
from umbra.proto.net.io_thread import Channel
from umbra.services.process.files import Disk
from umbra.services.trainer.checkpoints.saver import Saver


def die() -> None:
    """As by `kill -9`."""
    os.kill(os.getpid(), signal.SIGKILL)


def prepare(plan: Path) -> None:
    put_none_off()
    if lines := plan.read_text().splitlines():
        plan.write_text("\n".join(lines[1:]))
        moment, step = lines[0].split()
        end_at(moment, int(step))


def put_none_off() -> None:
    after = Saver.after

    def waiting(self: Saver, step: int, row: Any) -> None:
        if step // self._every > self.begun // self._every:
            self._settle(wait=True)
        after(self, step, row)

    Saver.after = waiting


def end_at(moment: str, at: int) -> None:
    call, rename, opened = Channel.call, Path.rename, Disk.open

    def calling(self: Channel, body: Any, *args: Any, **kwargs: Any) -> Any:
        if moment == "trained" and isinstance(body, CommitBatch) and body.step == at:
            die()
        reply = call(self, body, *args, **kwargs)
        if moment == "committed" and isinstance(body, CommitBatch) and body.step == at:
            die()
        return reply

    def opening(self: Disk, path: Path, **kwargs: Any) -> int:
        fd = opened(self, path, **kwargs)
        if moment == "writing" and path.parent.name == f".writing-{at}":
            os.write(fd, b"\x10" * 1000)
            die()
        return fd

    def renaming(self: Path, target: Path) -> Any:
        if moment == "written" and self.name == f".writing-{at}":
            die()
        renamed = rename(self, target)
        if moment == "named" and self.name == f".writing-{at}":
            die()
        return renamed

    Channel.call = calling
    Path.rename = renaming  # pyright: ignore[reportAttributeAccessIssue]
    Disk.open = opening


if __name__ == "__main__":
    plan = Path(sys.argv.pop(1))
    up.TRAINER_RESTARTS = len(plan.read_text().splitlines())
    run("trainer", lambda: prepare(plan))
