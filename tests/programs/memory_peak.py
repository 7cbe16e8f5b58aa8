"""Measured memory of training steps on a CPU: a line of bytes for each JSON line of input.

A line has the fields of `Case`. A step is that of the trainer, with the gradients there already, on
full rows. The figure is the growth of the resident memory (`VmHWM` of the kernel) beyond that
before the step, so it does not come from the code that is tested with it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from fakes.constants import constants
from fakes.full_rows import RowShape, full_rows
from transformers import AutoModelForCausalLM

from umbra.services.config import TrainerConfig
from umbra.services.modeling.models import attention_implementation
from umbra.services.trainer.learner import Learner

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Case:
    kind: str  # of Transformers' config, without "Config"
    model: dict[str, Any]
    rows: int
    width: int
    trainer: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Any:
        return getattr(transformers, f"{self.kind}Config")(**self.model)


def measure(case: Case, trainer: TrainerConfig) -> int:
    """Bytes that a forward and a backward pass take at most, beyond weights and gradients."""
    config = case.config()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=attention_implementation(config)
    )
    AcceleratorState._reset_state(True)  # else the first case's precision is that of all
    learner = Learner(model, trainer, steps=1)
    for parameter in learner.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.fill_(0)  # so that the kernel has to give the pages
    step(learner, full_rows(RowShape(1, 32)))  # libraries make their own buffers at the first time
    micro = full_rows(RowShape(case.rows, case.width))
    before = begin()
    step(learner, micro)
    return status("VmHWM") - before


def step(learner: Learner, micro: Any) -> None:
    temperature = torch.ones(len(micro.targets))
    logprobs, _ = learner.score(micro, temperature)
    learner.backward(logprobs.sum())


def status(name: str) -> int:
    """Bytes by that name in `/proc/self/status`."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def give_back_what_is_freed() -> None:
    """Have freed memory go back to the kernel at once."""
    for threshold in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        ctypes.CDLL(None).mallopt(threshold, 1 << 16)


def begin() -> int:
    """Reset the peak; return the present size."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status("VmRSS")


def main() -> None:
    give_back_what_is_freed()
    torch.set_num_threads(1)
    for line in sys.stdin:
        case = Case(**json.loads(line))
        with constants({"device": "cpu", **case.trainer}) as keys:
            taken = measure(case, TrainerConfig(**keys))
        print(json.dumps({**dataclasses.asdict(case), "bytes": taken}), flush=True)


if __name__ == "__main__":
    main()
