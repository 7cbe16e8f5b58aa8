"""One rank of a trainer that runs through several cases; started as torchrun would.

Arguments: the model, the folder with `cases.json` (settings by name; `checkpoints` is a folder in
there, `model` another model) and `batches.msgpack`. There each rank leaves `<case>.<rank>.json`,
and rank 0 `<case>.safetensors`. Where all cases set `sequence_parallel`, ranks share rows; where
all set `expert_parallel`, they divide experts. With `hosts` each host has a folder of checkpoints
of its own: by node the number at the end of its name. A case that is `refused` leaves the error. In
the case `dies` rank 1 ends by a signal within an update (where ranks share rows: within an
exchange), in the case `hangs` it stops there and never goes on. Nothing is compiled, which takes
longer than the cases.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from fakes.rank_bench import train
from fakes.slowness import seconds
from safetensors.torch import save_file

from umbra.proto.errors import PeerLostError, UsageError
from umbra.proto.records import Trajectory
from umbra.services.config import TrainerConfig
from umbra.services.modeling import sequence_parallel
from umbra.services.trainer.distributed.ranks import Ranks, join_ranks
from umbra.services.trainer.learner import Learner

IMPATIENT_S = 2.0  # until a rank that is silent is lost, on a quiet machine


def main(model: Path, folder: Path) -> int:
    """Run all cases; the exit code."""
    torch.compiler.set_stance("force_eager")
    cases: dict[str, dict[str, Any]] = json.loads((folder / "cases.json").read_bytes())
    batches = msgspec.msgpack.decode(
        (folder / "batches.msgpack").read_bytes(), type=list[list[Trajectory]]
    )
    config = TrainerConfig(
        device="cpu",
        rank_timeout_s=seconds(IMPATIENT_S if "hangs" in cases else 30.0),
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
                left = folder / f"{name}.{ranks.rank}.json"
                if "checkpoints" in settings:
                    settings["checkpoints"] = own_folder(folder, settings, ranks)
                if settings.pop("refused", False):
                    left.write_text(json.dumps({"error": refused(model, batches, ranks, settings)}))
                    continue
                path = Path(settings.pop("model", model))
                trained = train(path, batches, ranks, folder / f"{name}.critic", **settings)
                left.write_text(json.dumps({"rows": trained.rows, "local": trained.local}))
                if ranks.rank == 0:
                    save_file(trained.weights, folder / f"{name}.safetensors")
    except PeerLostError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def own_folder(folder: Path, settings: dict[str, Any], ranks: Ranks) -> Path:
    name, hosts = settings["checkpoints"], settings.pop("hosts", None)
    return folder / (f"{name}-{hosts[ranks.node]}" if hosts else name)


def refused(model: Path, batches: Any, ranks: Ranks, settings: dict[str, Any]) -> str:
    try:
        train(model, batches, ranks, **settings)
    except UsageError as error:
        return str(error)
    return ""


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
