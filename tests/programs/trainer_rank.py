"""One rank of a trainer that runs through several cases; started as torchrun would.

Arguments: the model, the folder with `cases.json` (settings by name; `checkpoints` is a folder in
there, `model` another model) and `batches.msgpack`. There each rank leaves `<case>.<rank>.json`,
and rank 0 `<case>.safetensors`. Where all cases set `sequence_parallel`, ranks share rows, and
where all set `expert_parallel` they divide experts. In the case `dies`
rank 1 ends by a signal within an update (where ranks share rows: within an exchange), in the case
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
from umbra.services.modeling import sequence_parallel
from umbra.services.runtime.config import TrainerConfig
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.ranks import join_ranks


def main(model: Path, folder: Path) -> int:
    """Run all cases; the exit code."""
    cases: dict[str, dict[str, Any]] = json.loads((folder / "cases.json").read_bytes())
    batches = msgspec.msgpack.decode(
        (folder / "batches.msgpack").read_bytes(), type=list[list[Trajectory]]
    )
    config = TrainerConfig(
        device="cpu",
        rank_timeout_s=seconds(1.0 if "hangs" in cases else 30.0),
        sequence_parallel=min(case.get("sequence_parallel", 1) for case in cases.values()),
        expert_parallel=min(case.get("expert_parallel", 1) for case in cases.values()),
    )
    try:
        with join_ranks(config) as ranks:
            for name, settings in cases.items():
                if name in ("dies", "hangs") and ranks.rank == 1:
                    number = signal.SIGKILL if name == "dies" else signal.SIGSTOP
                    if ranks.sequence:
                        end_in(sequence_parallel, "_exchange", number)
                    else:
                        end_in(Learner, "update", number)
                if "checkpoints" in settings:
                    settings = {**settings, "checkpoints": folder / settings["checkpoints"]}
                path = Path(settings.pop("model", model))
                trained = train(path, batches, ranks, folder / f"{name}.critic", **settings)
                found = {"rows": trained.rows, "local": trained.local}
                (folder / f"{name}.{ranks.rank}.json").write_text(json.dumps(found))
                if ranks.rank == 0:
                    save_file(trained.weights, folder / f"{name}.safetensors")
    except PeerLostError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def end_in(owner: Any, name: str, number: signal.Signals) -> None:
    """Have the second call of this function send this rank the signal `number`."""
    function, calls = getattr(owner, name), []

    def ending(*args: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return function(*args)

    setattr(owner, name, ending)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), Path(sys.argv[2])))
