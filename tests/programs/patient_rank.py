"""One of two ranks, the first of which is busy for longer than `rank_timeout_s`; see the test.

Arguments: the case, and a folder (the checkpoint's). In `works` rank 0 is busy before its order, as
with an export, and rank 1 while it writes its part of a checkpoint. In `leaves` and `stops` rank 0
is killed, or stopped, instead of giving an order.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from fakes.slowness import seconds

from umbra.proto.errors import PeerLostError
from umbra.services.config import CheckpointConfig, TrainerConfig
from umbra.services.trainer.checkpoints.folder import CheckpointFolder
from umbra.services.trainer.checkpoints.saver import Saver
from umbra.services.trainer.checkpoints.state import ModelState
from umbra.services.trainer.distributed.ranks import Ranks, join_ranks

TIMEOUT_S = min(10.0, seconds(2.0))  # it is slept through three times


def main(case: str, folder: Path) -> int:
    """Do the case; the exit code."""
    try:
        with join_ranks(TrainerConfig(device="cpu", rank_timeout_s=TIMEOUT_S)) as ranks:
            ranks.agree(True)  # both are there
            if case != "works" and ranks.rank == 0:
                number = signal.SIGKILL if case == "leaves" else signal.SIGSTOP
                os.kill(os.getpid(), number)
            if ranks.rank == 0:
                time.sleep(1.5 * TIMEOUT_S)  # the work
            assert ranks.spread("export", str) == "export"
            checkpoint(ranks, folder)
    except PeerLostError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def checkpoint(ranks: Ranks, folder: Path) -> None:
    """Rank 0 waits for the file of rank 1."""
    models = [ModelState("policy", torch.nn.Linear(4, 4))]
    made = CheckpointFolder(folder, CheckpointConfig())
    write = Saver._write

    def slow(self: Saver, *args: Any) -> Any:
        time.sleep(1.5 * TIMEOUT_S * ranks.rank)
        return write(self, *args)

    setattr(Saver, "_write", slow)  # noqa: B010 - of a class
    with closing(Saver(made, models, ranks, 0, {})) as saver:
        (outcome,) = saver.last(1, {})
    assert not outcome.error, outcome.error
    assert made.steps() == [1]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
