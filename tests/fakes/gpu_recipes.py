"""Updates of each recipe on a GPU that is not there, in a process of their own.

The models have the widths of real ones and few layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # of tensors without numbers
from accelerate.state import AcceleratorState
from fakes.rank_bench import as_text, make_batches
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from umbra.services.config.loader import load_config
from umbra.services.modeling import attention, attention_backends, gpu_copies, scorer
from umbra.services.modeling.lora import adapter_facts
from umbra.services.trainer import snapshot
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.critic import open_critic
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.distributed.rendezvous import RankPlace
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.mismatch import MismatchCheck, bound_of
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.trainer.update import PolicyUpdate
from umbra.services.weights.manifest import build_manifest
from umbra.services.weights.memory import private_memory

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
        patch.setattr(snapshot, "page_lock", lambda _: None)
        gpu_copies._copy_stream.cache_clear()
        with FakeGpu(mode) as gpu:
            yield gpu
        gpu_copies._copy_stream.cache_clear()


WIDTHS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
DENSE = Qwen3Config(**WIDTHS)
MIXTURE = Qwen3MoeConfig(
    **WIDTHS,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=768,
    decoder_sparse_step=1,
)
RECIPES: dict[str, tuple[Any, dict[str, Any]]] = {
    "float32 weights": (DENSE, {}),
    "bf16 weights": (DENSE, {"weights": "bf16"}),
    "recomputed": (DENSE, {"weights": "bf16", "activation_checkpointing": True}),
    "selective": (DENSE, {"activation_checkpointing": "selective"}),
    "moments on the host": (DENSE, {"weights": "bf16", "offload": "optimizer"}),
    "LoRA": (DENSE, {"lora_rank": 16}),
    "LoRA alone": (DENSE, {"lora_rank": 16, "lora_publish": "adapter"}),
    "experts": (MIXTURE, {"router_aux_loss_coef": 0.01}),
    "experts, LoRA": (MIXTURE, {"lora_rank": 16}),
    "minibatches": (DENSE, {"minibatches": 2}),
    "critic": (DENSE, {"objective": "ppo_critic"}),
    "served in fp8": (DENSE, {}),
    "experts served in fp8": (MIXTURE, {"router_aux_loss_coef": 0.01}),
    "masks": (DENSE, {"score_centering": 2}),
    "sharded": (DENSE, {"ranks": 2}),
    "sharded, recomputed": (DENSE, {"ranks": 2, "activation_checkpointing": True}),
    "sharded experts": (MIXTURE, {"ranks": 2}),
}

FP8 = (
    "generator.engine=vllm",
    "generator.engine_args.quantization=fp8",
    "trainer.max_mismatch=2",  # more than there is: numbers that are not there disagree
)


def ranks(world: int) -> Ranks:
    """The first of so many, none of which is there."""
    if world == 1:
        return Ranks()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return Ranks(RankPlace(0, world, world), 60.0)


def run(recipe: str, folder: Path) -> dict[str, Any]:
    """Make an update and write the version; return what there was of it."""
    if not (folder / "config.json").exists():
        make_model(folder, hidden=64, ff=128)  # for a critic
    architecture, keys = RECIPES[recipe]
    overrides = [f"trainer.{key}={as_text(value)}" for key, value in keys.items()]
    overrides += FP8 if "fp8" in recipe else ()
    config = load_config(
        overrides=[*overrides, "trainer.device=cuda", "run.steps=2", f"model.path={folder}"],
        environ={},
    )
    trainer = config.trainer
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        with fake_gpu() as gpu:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(architecture, attn_implementation="sdpa")
            learner = Learner(model.eval(), trainer, 2, ranks(trainer.ranks))
            critic = open_critic(config, learner)
            if critic is not None:
                critic._thread = None  # in which it would be a torch without a GPU
            mismatch = MismatchCheck(config, learner) if "fp8" in recipe else None
            update = PolicyUpdate(config, learner, critic, mismatch)
            batch = make_batch(make_batches(1)[0], architecture.vocab_size)
            gpu.products.clear()
            scorer._APART = math.inf  # numbers that are not there seem to differ
            learner.logprobs(learner.pack(batch.tokens), batch.temperature)
            row = update(batch, 0, lambda: True)
            products = {str(dtype): count for dtype, count in gpu.products.items()}
            adapter = adapter_facts(trainer, "")
            layout = tensor_layout(learner.model, "bfloat16", adapter=adapter is not None)
            manifest = build_manifest(layout, 4 << 20, adapter=adapter)
            slot = private_memory(manifest.total_bytes)
            written = write_shards(learner.model, manifest, slot, world=trainer.ranks)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    embedding = architecture.vocab_size * architecture.hidden_size * 4
    return {
        "device": str(learner.device),
        "elsewhere": [n for n, t in learner.model.state_dict().items() if not t.is_cuda],
        "updates": row and row["updates"],
        "products": products,
        "written": written,
        "copied": gpu.written,
        "version": sum(entry.nbytes for entry in manifest.tensors),
        "ranks": trainer.ranks,
        "published": sorted({entry.dtype for entry in manifest.tensors}),
        "agreement": bound_of(config, learner.device.type)[1],
        "compared": row and row.get("mismatch/compared"),
        "largest": gpu.largest,
        "bound": max(embedding, trainer.logits_bytes_on("cuda")),
    }
