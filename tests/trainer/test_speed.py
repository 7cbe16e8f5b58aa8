"""Where the seconds of a step go, and traces of chosen steps."""

import gzip
import json
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path

import torch

from umbra.services.trainer.metrics import peak_memory_gib
from umbra.services.trainer.speed import Phases, traced

CPU = torch.device("cpu")


def test_phases_add_up_to_the_step() -> None:
    """Between two readings of the clock pass 1, 2, 3, ... seconds."""
    clock = accumulate(range(100))
    phases = Phases(CPU, lambda: float(next(clock)))  # at 0
    with phases("wait"):  # from 1 to 3
        pass
    with phases("train"):  # from 6
        for _ in range(2):
            with phases("forward"):  # from 10 to 15, from 21 to 28
                pass
    # to 36; the step ends at 45
    assert phases.take() == {
        "wait": 2, "train": 30, "train/forward": 12, "train/other": 18, "other": 13, "step": 45,
    }  # fmt: skip
    assert phases.take() == {"other": 10, "step": 10}, "it restarts"


def ranges(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_a_trace_has_the_phases_of_its_step_alone(tmp_path: Path) -> None:
    phases, file = Phases(CPU), tmp_path / "profile" / "step-2.json.gz"
    for step in (1, 2, 3):
        with (
            traced(file) if step == 2 else nullcontext(),
            phases(f"train {step}"),
            phases("forward"),
        ):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    assert ranges(file) == {"train 2", "forward"}


def test_the_peak_of_memory_is_of_this_process() -> None:
    assert 0.01 < peak_memory_gib(CPU) < 1000
