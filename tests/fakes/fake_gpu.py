"""A GPU that is not there: its tensors have a device, a dtype and a shape, and no numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from umbra.services.modeling import attention, attention_backends, gpu_copies
from umbra.services.trainer import learner, snapshot

ATEN = torch.ops.aten
PRODUCTS = (ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN._grouped_mm.default)
MEMORY = 80 << 30


class FakeGpu(TorchDispatchMode):
    """A GPU whose tensors have a device, shape and dtype only; tensors on the CPU are computed.

    A number that is asked of the GPU is 1.

    Attributes:
        products: how many matrix products there were of each dtype.
        largest: bytes of the largest tensor, and its shape.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.products: Counter[torch.dtype] = Counter()
        self.largest: tuple[int, tuple[int, ...]] = 0, ()
        self.written = 0  # bytes that were copied to the host's memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # its parts come here
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        there = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if not (fakes or there):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is ATEN._local_scalar_dense.default:
            return {torch.bool: True, torch.int64: 1, torch.int32: 1}.get(args[0].dtype, 1.0)
        if func is ATEN.equal.default:
            return True
        if func is ATEN.copy_.default and not isinstance(args[0], FakeTensor):
            assert args[0].shape == args[1].shape and args[0].dtype == args[1].dtype
            self.written += args[0].nbytes
            return args[0]
        moved: Any = tree_map(self._there, (args, kwargs))
        args, named = moved
        found = func(*args, **named)
        if func in PRODUCTS:
            self.products[args[0].dtype] += 1
        for made in tree_leaves(found):
            if isinstance(made, FakeTensor) and made.device.type == "cuda":
                self.largest = max(self.largest, (made.nbytes, tuple(made.shape)))
        return found

    def _there(self, leaf: Any) -> Any:
        """Return a tensor with numbers as one without; not the same each time, as modes would."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        with unset_fake_temporarily():
            bare = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return FakeTensor(self._mode, bare, leaf.device)


class _Stream:
    """Of the GPU, where nothing takes time."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def _nothing(self, *_: Any, **__: Any) -> None: ...

    synchronize = wait_stream = wait_event = _nothing

    def record(self, *_: Any) -> _Stream:
        return self

    record_event = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 1.0


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Any, *how: Any) -> Any:
    """Stand in for the compiled flex_attention: its arguments and its result."""
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    held = [query, key, value, *(one for one in vars(mask).values() if isinstance(one, Tensor))]
    assert {one.device for one in held} == {query.device}
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    sums = query.float().sum(-1) + key.float().sum(-1)
    return query.sum(-1, keepdim=True) + key.sum(-1, keepdim=True) + value, sums


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Let this process have one GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.MonkeyPatch.context() as patch:
        facts = SimpleNamespace(total_memory=MEMORY, name="fake", major=9, minor=0)
        for name, double in {
            "is_available": lambda: True,
            "is_bf16_supported": lambda *_: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda _: None,
            "synchronize": lambda *_: None,
            "get_device_properties": lambda *_: facts,
            "max_memory_allocated": lambda *_: 0,
            "reset_peak_memory_stats": lambda *_: None,
            "Event": _Stream,
            "Stream": _Stream,
            "stream": lambda _: nullcontext(),
            "current_stream": lambda *_: _Stream(),
        }.items():
            patch.setattr(torch.cuda, name, double)
        patch.setattr(attention, "flex_fault", lambda *_: None)
        patch.setattr(attention_backends, "_compiled", lambda _: _attention)
        patch.setattr(learner, "ceiling", lambda _: 1e15)
        patch.setattr(snapshot, "page_lock", lambda _: None)
        gpu_copies._copy_stream.cache_clear()
        with FakeGpu(mode) as gpu:
            yield gpu
        gpu_copies._copy_stream.cache_clear()
