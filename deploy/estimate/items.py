"""What the sums of the estimate are made of: bytes for a purpose, at some time, in a process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from umbra.deploy.estimate.gpus import GIB
from umbra.deploy.estimate.sizes import ModelSizes, PassPeaks, RowShape

LOADING, EXPORT = "loading", "export"
LOGITS = "logits"  # computed, and gone back through: all activations are there
BACKWARD = "backward"  # the last layer is gone back through: all activations are there
REDUCE = "reduce"  # its gradients are summed over the ranks
FIRST = "first layer"  # is gone back through: the gradients of all others are there
COLLECT = "collect"  # gradients of what is outside of the layers are summed: all are there
UPDATE = "update"  # the optimizer's step
FULL = (LOGITS, BACKWARD, REDUCE)  # of activations
PASSES = (*FULL, FIRST, COLLECT)
TRAINING = (*PASSES, UPDATE)
AFTER_LOADING = (*TRAINING, EXPORT)
PHASES = (LOADING, *AFTER_LOADING)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
COMPUTE_BYTES = {"no": 4, "bf16": 2, "fp16": 2}
PROCESS = int(0.6 * GIB)  # Python with torch and Transformers
GPU_PROCESS = 2 * GIB  # the same with CUDA's libraries
CONTEXT = 1 * GIB  # of a GPU: CUDA's context, cuBLAS, and NCCL's buffers
VLLM_SHARE = 0.92  # vLLM 0.32's gpu_memory_utilization
VLLM_WORK = 3 * GIB  # of it: CUDA graphs, and the pass that it profiles


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes for one purpose.

    Attributes:
        during: the phases in which they are there; a process needs the most of any phase.
        remedy: what a user can change to need less, as the end of "...: ".
    """

    name: str
    bytes: int
    during: tuple[str, ...] = PHASES
    remedy: str = ""


def peak(items: Iterable[Item]) -> int:
    """The most that `items` take together in any phase."""
    items = list(items)
    return max(sum(item.bytes for item in items if phase in item.during) for phase in PHASES)


@dataclass(frozen=True, slots=True)
class Need:
    """What each of `count` like processes needs.

    Attributes:
        gpus: indices of the GPUs of each; empty on a CPU.
        device: memory of each of these GPUs.
        host: memory of the host.
    """

    name: str
    gpus: tuple[tuple[int, ...], ...]
    device: tuple[Item, ...]
    host: tuple[Item, ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the model, and of the passes that the run makes over it.

    Attributes:
        training: a trainer's forward and backward pass over its fullest micro-batch.
        scoring: a forward pass of a scorer of logprobs.
        prefill: a forward pass of the torch engine over prompts.
        rows: of that micro-batch.
    """

    sizes: ModelSizes
    training: PassPeaks
    scoring: PassPeaks
    prefill: PassPeaks
    rows: RowShape


def kind_of(device: str, *, gpu: bool) -> str:
    """ "cuda" or "cpu": what a configured device name means on a machine with or without GPUs."""
    name = device.partition(":")[0]
    return ("cuda" if gpu else "cpu") if name == "auto" else name


def first_gpu(device: str) -> int:
    """The index in a configured device name; 0 if it has none."""
    number = device.partition(":")[2]
    return int(number) if number.isdigit() else 0
