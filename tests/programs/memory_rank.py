"""Measured memory of a trainer's rank on a CPU: for each line of `cases.json` in the folder, peaks.

    python memory_rank.py FOLDER

Each of as many processes as torchrun's variables say loads a model by rows, and makes two updates
of two full micro-batches each, as the trainer does. Written to `FOLDER/NAME.RANK.json`: the growth
of the resident set (`VmHWM` of the kernel) while it loads and while it trains, in bytes. It does
not come from the code that is tested with it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from fakes.full_rows import RowShape, full_rows
from programs.memory_peak import begin, give_back_what_is_freed, status
from transformers import AutoModelForCausalLM

from umbra.services.config import TrainerConfig
from umbra.services.modeling.models import open_weights
from umbra.services.trainer.distributed.ranks import Ranks, join_ranks
from umbra.services.trainer.learner import Learner


def measure(directory: Path, trainer: dict[str, Any], rows: RowShape, ranks: Ranks) -> Any:
    AcceleratorState._reset_state()
    before = begin()
    model, files = open_weights(AutoModelForCausalLM, directory, "model.path")
    learner = Learner(
        model, TrainerConfig(device="cpu", threads=1, **trainer), 1, ranks, files=files
    )
    loading = status("VmHWM") - before
    begin()
    for step in range(2):
        for _ in range(2):
            micro = full_rows(rows)
            logprobs, _ = learner.score(micro, torch.ones(len(micro.targets)), with_entropy=True)
            learner.backward(logprobs.sum())
            del logprobs
        learner.update(step)
    return {"loading": loading, "training": status("VmHWM") - before}


def main() -> None:
    give_back_what_is_freed()
    folder = Path(sys.argv[1])
    cases = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    world = int(os.environ["WORLD_SIZE"])
    with join_ranks(TrainerConfig(device="cpu", sequence_parallel=world)) as sharing:
        ranks = Ranks(sharing.place, sharing.timeout_s)
        for name, (model, trainer, rows) in cases.items():
            among = sharing if trainer.get("sequence_parallel", 1) > 1 else ranks
            # Libraries make their own buffers at the first time, and oneDNN code for each shape.
            measure(folder / "warm", trainer, RowShape(*rows), among)
            found = measure(folder / model, trainer, RowShape(*rows), among)
            text = json.dumps(found)
            (folder / f"{name}.{ranks.rank}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
