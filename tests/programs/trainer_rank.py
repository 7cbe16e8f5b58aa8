"""One rank of a trainer that runs through several cases; started as torchrun would.

Arguments: the model, the folder with `cases.json` (settings by name; `checkpoints` is a folder in
there) and `batches.msgpack`. There each rank leaves `<case>.<rank>.json`, and rank 0
`<case>.safetensors`. In the case `dies` rank 1 ends by a signal within an update, in the case
`hangs` it stops there and never goes on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
from fakes.rank_bench import train
from fakes.slowness import seconds
from safetensors.torch import save_file

from umbra.proto.errors import PeerLostError
from umbra.proto.records import Trajectory
from umbra.services.runtime.config import TrainerConfig
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.ranks import join_ranks


def main(model: Path, folder: Path) -> int:
    """Run all cases; the exit code."""
    cases: dict[str, dict[str, Any]] = json.loads((folder / "cases.json").read_bytes())
    batches = msgspec.msgpack.decode(
        (folder / "batches.msgpack").read_bytes(), type=list[list[Trajectory]]
    )
    timeout_s = seconds(1.0 if "hangs" in cases else 30.0)
    try:
        with join_ranks(TrainerConfig(device="cpu", rank_timeout_s=timeout_s)) as ranks:
            for name, settings in cases.items():
                if name in ("dies", "hangs") and ranks.rank == 1:
                    end_in_an_update(signal.SIGKILL if name == "dies" else signal.SIGSTOP)
                if "checkpoints" in settings:
                    settings = {**settings, "checkpoints": folder / settings["checkpoints"]}
                trained = train(model, batches, ranks, folder / f"{name}.critic", **settings)
                found = {"rows": trained.rows, "local": trained.local}
                (folder / f"{name}.{ranks.rank}.json").write_text(json.dumps(found))
                if ranks.rank == 0:
                    save_file(trained.weights, folder / f"{name}.safetensors")
    except PeerLostError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def end_in_an_update(number: signal.Signals) -> None:
    """Have the second update of this rank send it `number`."""
    update, calls = Learner.update, []

    def ending(self: Learner, step: int) -> Any:
        calls.append(step)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return update(self, step)

    Learner.update = ending  # pyright: ignore[reportAttributeAccessIssue]


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
