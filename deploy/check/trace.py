"""A training step without memory: tensors that have shapes but no data, and what they would take.

The step is that of the trainer: its own `Scorer`, layers and adapter, run on Transformers' class
for the model under torch's `FakeTensorMode`. A dispatch mode sees each tensor come and go. So what
is counted is what autograd keeps for this very architecture, precision and attention, without a
formula for any of them. Not seen are memory that a kernel takes and gives back within one
operation, and the gaps that an allocator leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from umbra.deploy.check.items import ModelSizes, PassPeaks, RowShape, Sized
from umbra.services.config import TrainerConfig
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.experts import set_experts
from umbra.services.modeling.lora import add_adapter, is_adapter
from umbra.services.modeling.micro_batch import MicroBatch, Tokens, Unit, lay_out
from umbra.services.modeling.models import attention_implementation
from umbra.services.modeling.scorer import Scorer
from umbra.services.modeling.sequence_parallel import (
    SequenceGroup,
    SequenceParallel,
    SequenceShare,
)
from umbra.services.trainer.distributed.sharding import decoder_layers, prepare_layers

_MANY, _FEW = 6, (3, 5)  # layers
_GROUPED = torch.ops.aten._grouped_mm.default


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make below it, for as long as they live.

    Args:
        known: tensors that are there already and don't count.
        is_attention: whether a tensor holds a number for each pair of positions.
    """

    def __init__(
        self,
        known: Iterable[Tensor] = (),
        is_attention: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.attention = 0  # of `now`
        self.away = self.most_away = 0  # in host memory
        self._is_attention = is_attention
        self._sizes = {tensor.untyped_storage()._cdata: (0, False, False) for tensor in known}
        self._is_away = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and count what is new in its result."""
        if func is _GROUPED:
            result = _grouped_mm(*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size, of_pairs = storage.nbytes(), self._is_attention(tensor)
        self._sizes[key] = size, of_pairs, self._is_away
        self._add(size, of_pairs, self._is_away)
        weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        size, of_pairs, away = self._sizes.pop(key)
        self._add(-size, of_pairs, away)

    def _add(self, size: int, of_pairs: bool, away: bool) -> None:
        if away:
            self.away += size
            self.most_away = max(self.most_away, self.away)
            return
        self.now += size
        self.attention += size * of_pairs
        self.peak = max(self.peak, self.now)

    def keep_away(self) -> AbstractContextManager[Any]:
        """As torch's `save_on_cpu` of tensors on a GPU: what autograd keeps is copied to the host.

        What is copied counts as `away`, and once more as here when the backward pass needs it.
        """

        def pack(tensor: Tensor) -> Tensor:
            self._is_away = True
            try:
                return tensor.clone()
            finally:
                self._is_away = False

        return torch.autograd.graph.saved_tensors_hooks(pack, torch.clone)


def pass_peaks(
    config: Any, sizes: ModelSizes | None, make: Callable[[Any], Outline], **how: Any
) -> PassPeaks:
    """`Outline.peaks` of the model of `config`; of one with many like layers, from a few of them.

    Each layer adds the same to what is kept and to the peaks; logits are those of the larger one.

    Args:
        sizes: of that model; None: the layers are not treated alike.
        make: an outline for such a config.
        how: arguments of `Outline.peaks`.
    """
    count: int = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ()
    if count <= _MANY or sizes is None or not sizes.alike or len(set(kinds)) > 1:
        return make(config).peaks(**how)
    few, more = (make(_first(config, layers)).peaks(**how) for layers in _FEW)

    def grown(name: str) -> int:
        begin, end = getattr(few, name), getattr(more, name)
        return begin + (count - _FEW[0]) * (end - begin) // (_FEW[1] - _FEW[0])

    names = ("kept", "attention", "forward", "backward", "offloaded")
    kept, attention, forward, backward, offloaded = map(grown, names)
    return PassPeaks(kept, attention, more.logits, forward, backward, offloaded)


def _first(config: Any, layers: int) -> Any:
    cut = copy.deepcopy(config)
    cut.num_hidden_layers = layers
    if getattr(cut, "layer_types", None):
        cut.layer_types = cut.layer_types[:layers]
    return cut


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the shape of a grouped product; torch knows it for bfloat16 alone."""
    if b.dim() == 3:
        return a.new_empty((*a.shape[:-1], b.shape[-1]))
    assert offs is not None
    return a.new_empty((len(offs), a.shape[0], b.shape[1]))


class Outline:
    """A model of `config` (Transformers') without memory, and passes over it.

    Args:
        config: of the model; only it is read, no weights.
        trainer: adapter, recomputation and logits are as it says.
        dtype: of the parameters.
        kind: of the device, "cpu" or "cuda".
    """

    def __init__(self, config: Any, trainer: TrainerConfig, dtype: torch.dtype, kind: str) -> None:
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._live: LiveBytes | None = None  # of the pass that is under way
        self._kind = kind
        self._shared_by = trainer.sequence_parallel
        plain = msgspec.structs.replace(trainer, compile=False)  # which would run a compiler
        with torch.device("meta"):
            self.model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=attention_implementation(config),
                trust_remote_code=False,
            )
        set_experts(self.model, trainer.experts)
        if trainer.lora_rank:
            add_adapter(self.model, trainer, seed=0)
        with self._fake:
            _without_data(self.model, dtype)
            prepare_layers(self.model, plain, kind, self._keep_away)
            self._attention = Attention.prepare(self.model, "sdpa", torch.device("cpu"))
            if kind == "cuda" and trainer.attention != "sdpa":
                self._attention = dataclasses.replace(self._attention, backend="flex")
        self._chunk = int(trainer.logits_mib * 2**20)
        self._entropy = trainer.pieces.entropy_coef > 0

    def sizes(self, kv_numbers: int) -> ModelSizes:
        """What of the model decides how much memory it takes."""
        layers = {
            id(parameter): number
            for number, layer in enumerate(decoder_layers(self.model))
            for parameter in layer.parameters()
        }
        tensors = tuple(
            Sized(
                name,
                tuple(parameter.shape),
                parameter.requires_grad,
                layers.get(id(parameter), -1),
                is_adapter(name),
            )
            for name, parameter in self.model.named_parameters()
        )
        config: Any = self.model.config.get_text_config()
        return ModelSizes(tensors, kv_numbers, config.vocab_size)

    def peaks(
        self,
        rows: RowShape,
        *,
        autocast: torch.dtype | None = None,
        train: bool = True,
        last: bool = False,
    ) -> PassPeaks:
        """Of one pass over `rows` without padding, whose tokens are nearly all learned.

        Args:
            autocast: dtype of the computation, if it is not that of the parameters.
            last: only the last token of a sequence has logits, as when a prompt is read.
            train: with a backward pass, whose gradients are added to those that are there.
        """
        full = full_rows(rows, last=last)
        micro = self._fakes(full)
        group = _Silent(self._shared_by) if self._shared_by > 1 and train else None
        with ExitStack() as stack:
            stack.enter_context(self._fake)
            scorer = Scorer(self.model, self._chunk, self._attention, group).eval()
            scorer._compared = True  # it would look at logits
            if scorer._parallel is not None:
                scorer._parallel = self._shared(scorer._parallel, full)
            temperature = torch.ones(len(micro.targets))
            known = [*self.model.parameters(), *self.model.buffers()]
            trained = [p for p in self.model.parameters() if p.requires_grad] if train else []
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
                known.append(parameter.grad)
            live = LiveBytes(known, partial(_of_pairs, width=rows.width))
            self._live = stack.enter_context(live)
            head = self.model.get_output_embeddings()
            assert head is not None, "the scorer has looked"
            marks = _Marks(head, live)
            stack.callback(marks.close)
            stack.enter_context(torch.set_grad_enabled(train))
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                logprobs, entropy = scorer(
                    micro, temperature, entropy_gradient=self._entropy and train
                )
            if train:
                loss = logprobs.sum() + (entropy.sum() if self._entropy else 0)
                del logprobs, entropy
                loss.backward()
            return marks.peaks()

    def _keep_away(self) -> AbstractContextManager[Any]:
        if self._live is None or self._kind != "cuda":
            return nullcontext()  # on a CPU what is kept is in host memory already
        return self._live.keep_away()

    def _shared(self, parallel: SequenceParallel, rows: MicroBatch) -> Any:
        """Return `parallel` with the share of `rows`, which it needs data to find."""
        with unset_fake_temporarily():
            share = parallel.share(rows)
        share.rows, share.own = self._fakes(share.rows), self._fakes(share.own)
        share.learned = self._fake.from_tensor(share.learned)
        return _Known(share)

    def _fakes(self, micro: MicroBatch) -> MicroBatch:
        """Return `micro` with tensors that have no data."""
        tensors = {
            field.name: self._fake.from_tensor(value)
            for field in dataclasses.fields(micro)
            if isinstance(value := getattr(micro, field.name), Tensor)
        }
        return dataclasses.replace(micro, **tensors)


class _Silent(SequenceGroup):
    """A sequence group of one rank: nothing is sent."""

    def __init__(self, size: int) -> None:
        nobody: Any = None
        super().__init__(nobody, 0, size)

    def exchange(self, sent: Tensor) -> Tensor:
        return torch.empty_like(sent)

    def sum(self, values: Tensor) -> None:
        """Nothing to add."""


class _Known:
    """A stand-in for `SequenceParallel` with a share that is known already."""

    def __init__(self, share: SequenceShare) -> None:
        self._share = share

    def share(self, _: MicroBatch) -> SequenceShare:
        return self._share

    def check(self, _: SequenceShare) -> None:
        """Layers that have no data exchange as others do."""


class _Marks:
    """Notes the peaks before the output layer, until its gradients are there, and after."""

    def __init__(self, head: nn.Module, live: LiveBytes) -> None:
        self._live = live
        self._kept = self._attention = 0
        self._peaks: list[int] = []
        # Before the scorer's own, which takes the hidden states away.
        self._hook = head.register_forward_pre_hook(self._begins, prepend=True)

    def _begins(self, _head: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self._peaks:
            return
        self._kept, self._attention = self._live.now, self._live.attention
        self._next()
        if args[0].requires_grad:
            args[0].register_hook(lambda _: self._next())

    def _next(self) -> None:
        self._peaks.append(self._live.peak)
        self._live.peak = self._live.now

    def close(self) -> None:
        self._hook.remove()

    def peaks(self) -> PassPeaks:
        """What the pass, which is over, has taken."""
        self._next()
        forward, logits, *backward = self._peaks
        kept = self._kept
        return PassPeaks(
            kept,
            attention=min(kept, self._attention),
            logits=logits - kept,
            forward=forward,
            backward=backward[0] if backward else 0,
            offloaded=self._live.most_away,
        )


def _without_data(model: nn.Module, dtype: torch.dtype) -> None:
    """Put tensors that claim to be on the CPU in the place of those that are there.

    Not the meta device: autocast, and the choice of an attention kernel, go by it. Parameters get
    `dtype`.
    """
    new: dict[int, Tensor] = {}  # weights that are tied stay so
    for module in model.modules():
        for places in (module._parameters, module._buffers):
            for name, old in places.items():
                if old is None:
                    continue
                if id(old) not in new:
                    trained = isinstance(old, nn.Parameter)
                    empty = torch.empty(old.shape, dtype=dtype if trained else old.dtype)
                    new[id(old)] = nn.Parameter(empty, old.requires_grad) if trained else empty
                places[name] = new[id(old)]  # pyright: ignore[reportArgumentType]


def _of_pairs(tensor: Tensor, width: int) -> bool:
    shape = tensor.shape
    rank = 3 if tensor.dtype == torch.bool else 4  # hidden states have 3
    return len(shape) >= rank and shape[-1] == shape[-2] == width


def full_rows(rows: RowShape, *, last: bool = False) -> MicroBatch:
    """`rows` without padding, of one sequence or, if they are packed, two each.

    All tokens but the first of a sequence are learned, or its `last` one alone.
    """
    width = rows.width
    halves = (width - width // 2, width // 2) if rows.packed and width > 1 else (width,)
    fed = [half for _ in range(rows.count) for half in halves]
    lengths = torch.tensor(fed) + 1  # the last token is not fed
    total = int(lengths.sum())
    starts = lengths.cumsum(0) - lengths
    if last:
        learned = torch.zeros(total, dtype=torch.bool)
        learned[starts + lengths - 1] = True
    else:
        learned = torch.ones(total, dtype=torch.bool)
        learned[starts] = False
    owner = torch.arange(len(fed)).repeat_interleave(lengths)
    tokens = Tokens(
        ids=torch.zeros(total, dtype=torch.int64),
        lengths=lengths,
        learned=learned.nonzero().squeeze(1),
        owner=owner[learned],
    )
    each = len(halves)
    units = [
        [Unit((row * each + at,), 0, fed[row * each + at]) for at in range(each)]
        for row in range(rows.count)
    ]
    return lay_out(tokens, units)
