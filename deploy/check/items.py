"""What the estimate adds up: bytes by purpose and phase, tensors of a model, peaks of a pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

GIB = 1 << 30
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
class Sized:
    """A parameter, as sharding sees it."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    layer: int  # of the decoder; -1: outside of the layers (embedding, output layer, last norm)
    adapter: bool = False

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def width(self) -> int:
        """Return the numbers of a row; 0 for a vector."""
        return prod(self.shape[1:]) if len(self.shape) > 1 else 0

    def share(self, ranks: int) -> int:
        """Numbers that the first of `ranks` ranks holds: as many whole rows as any of them."""
        if not self.shape:
            return 1
        return -(-self.shape[0] // ranks) * prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """All parameters of a model; numbers are counts of elements, not bytes."""

    tensors: tuple[Sized, ...]
    kv_numbers: int
    """In the cache of keys and values, for one token in all layers."""
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Return the numbers of the model without an adapter, which is merged into it."""
        return sum(t.count for t in self.tensors if not t.adapter)

    @property
    def adapter(self) -> int:
        return sum(t.count for t in self.tensors if t.adapter)

    @property
    def trained(self) -> int:
        """Return the numbers that have a gradient."""
        return sum(t.count for t in self.tensors if t.trained)

    def share(self, ranks: int, *, trained: bool = False) -> int:
        """Numbers that one of `ranks` ranks holds of all tensors, or of those that are trained."""
        return sum(t.share(ranks) for t in self.tensors if t.trained or not trained)

    @property
    def root(self) -> tuple[int, int]:
        """Return the numbers outside of the layers, and how many of them are trained."""
        return self._in({-1})

    @property
    def layers(self) -> int:
        return sum(t.count for t in self.tensors if t.layer >= 0)

    def root_share(self, ranks: int) -> int:
        """Return the trained numbers outside of the layers that one of `ranks` ranks holds."""
        return sum(t.share(ranks) for t in self.tensors if t.trained and t.layer < 0)

    @property
    def largest_layer(self) -> tuple[int, int]:
        """Return the numbers of the largest layer, and how many of them are trained."""
        return max(self._in({layer}) for layer in {t.layer for t in self.tensors} - {-1})

    @property
    def alike(self) -> bool:
        layers: dict[int, list[tuple[tuple[int, ...], bool]]] = {}
        for tensor in self.tensors:
            layers.setdefault(tensor.layer, []).append((tensor.shape, tensor.trained))
        layers.pop(-1, None)
        first, *others = layers.values()
        return all(other == first for other in others)

    def _in(self, layers: set[int]) -> tuple[int, int]:
        inside = [t for t in self.tensors if t.layer in layers]
        return sum(t.count for t in inside), sum(t.count for t in inside if t.trained)


@dataclass(frozen=True, slots=True)
class PassPeaks:
    """Bytes of a pass, parameters and gradients left out."""

    kept: int
    """Alive when the output layer begins: activations that the backward pass needs, and masks."""
    attention: int
    """Of `kept`: what has a number for each pair of positions (masks, scores)."""
    logits: int
    """Most beyond `kept`, until gradients have come back through the output layer."""
    forward: int
    """Most while the layers compute, before the output layer begins."""
    backward: int
    """Most while the layers' gradients are computed."""
    offloaded: int = 0
    """In host memory instead: what recomputed layers keep, with `trainer.offload`."""

    @property
    def working(self) -> int:
        """Return the most bytes beyond `kept` while the layers compute."""
        return max(0, self.forward - self.kept, self.backward - self.kept)

    @property
    def peak(self) -> int:
        """The most at any time."""
        return self.kept + max(self.logits, self.working)


@dataclass(frozen=True, slots=True)
class RowShape:
    """Rows of a micro-batch, and how many sequences lie in one: one alone needs no mask."""

    count: int
    width: int
    packed: bool = True


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
    """Return "cuda" or "cpu": the meaning of a device name on a machine with or without GPUs."""
    name = device.partition(":")[0]
    return ("cuda" if gpu else "cpu") if name == "auto" else name


def first_gpu(device: str) -> int:
    number = device.partition(":")[2]
    return int(number) if number.isdigit() else 0
