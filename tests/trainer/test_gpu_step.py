"""Whole updates on a GPU that is not there: nothing on another device, in a wrong dtype, too large.

Its tensors have no numbers. `one_gpu.cpp` gives a torch without CUDA what autograd asks of a GPU.
The models have the widths of real ones and few layers.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # of tensors without numbers
from accelerate.state import AcceleratorState
from fakes.rank_bench import configured, make_batches
from fakes.slowness import seconds
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

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
        stream = Mock(**{"elapsed_time.return_value": 1.0})  # or event, where nothing takes time
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
            "Event": lambda *_, **__: stream,
            "Stream": lambda *_, **__: stream,
            "stream": lambda _: nullcontext(),
            "current_stream": lambda *_: stream,
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
FP8 = {
    "generator.engine": "vllm",
    "generator.engine_args.quantization": "fp8",
    "max_mismatch": 2,  # more than there is: numbers that are not there disagree
}
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
    "served in fp8": (DENSE, FP8),
    "experts served in fp8": (MIXTURE, {"router_aux_loss_coef": 0.01, **FP8}),
    "masks": (DENSE, {"score_centering": 2}),
    "sharded": (DENSE, {"ranks": 2}),
    "sharded, recomputed": (DENSE, {"ranks": 2, "activation_checkpointing": True}),
    "sharded experts": (MIXTURE, {"ranks": 2}),
}


def ranks(world: int) -> Ranks:
    """The first of so many, none of which is there."""
    if world == 1:
        return Ranks()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return Ranks(RankPlace(0, world, world), 60.0)


def run_all(folder: Path) -> None:
    """Print, as JSON, what each recipe raised."""
    make_model(folder, hidden=64, ff=128)  # for a critic
    raised = dict.fromkeys(RECIPES, "")
    for recipe in RECIPES:
        try:
            check(recipe, folder)
        except Exception:  # noqa: BLE001 - the test shows it
            raised[recipe] = traceback.format_exc()
    print(json.dumps(raised))


def check(recipe: str, folder: Path) -> None:
    """Make an update and write the version."""
    architecture, keys = RECIPES[recipe]
    config = configured(folder, **{"device": "cuda", "run.steps": 2, **keys})
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
            products = gpu.products.copy()
            adapter = adapter_facts(trainer, "")
            layout = tensor_layout(learner.model, "bfloat16", adapter=adapter is not None)
            manifest = build_manifest(layout, 4 << 20, adapter=adapter)
            slot = private_memory(manifest.total_bytes)
            written = write_shards(learner.model, manifest, slot, world=trainer.ranks)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert learner.device == torch.device("cuda", 0)
    assert all(tensor.is_cuda for tensor in learner.model.state_dict().values())
    assert row is not None
    assert row["updates"] == trainer.minibatches
    # Heads of value models, and adapters of experts, which peft multiplies out of autocast.
    wide = {torch.float32} if recipe in ("critic", "experts, LoRA") else set[torch.dtype]()
    assert products.keys() == {torch.bfloat16} | wide
    assert products[torch.bfloat16] > 20
    # vLLM quantizes what comes: whole numbers are published, and their rounding is allowed for.
    assert {entry.dtype for entry in manifest.tensors} == {"BF16"}
    assert bound_of(config, "cuda")[1] == ("fp8" if "fp8" in recipe else "bfloat16")
    assert bool(row.get("mismatch/compared")) == ("fp8" in recipe)
    share = sum(entry.nbytes for entry in manifest.tensors) / trainer.ranks
    assert share <= written <= share * 1.02
    assert written == gpu.written
    embedding = architecture.vocab_size * architecture.hidden_size * 4
    bound = max(embedding, trainer.logits_bytes_on("cuda"))
    assert gpu.largest[0] <= bound * 1.01, gpu.largest  # gathered with small ones


TESTS, TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
# The process has the GPU from its start: before torch.
START = """
import ctypes, pathlib, sys
ctypes.CDLL(sys.argv[1])
from trainer.test_gpu_step import run_all
run_all(pathlib.Path(sys.argv[2]))
"""

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By each recipe; all in one process."""
    folder = tmp_path_factory.mktemp("gpu")
    library = folder / "one_gpu.so"
    how = ["-std=c++20", "-shared", "-fPIC", f"-I{TORCH}/include", f"-L{TORCH}/lib"]
    how += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH}/lib", "-o", str(library)]
    source = TESTS / "programs" / "one_gpu.cpp"
    subprocess.run(["g++", source, *how], check=True, timeout=seconds(120.0))
    done = subprocess.run(
        [sys.executable, "-c", START, library, folder / "model"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=seconds(240.0),
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_update_and_its_version(raised: dict[str, str], recipe: str) -> None:
    assert not raised[recipe], raised[recipe]
