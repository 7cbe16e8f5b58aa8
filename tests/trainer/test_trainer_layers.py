"""Options of layers and of memory that leave a policy's learning unchanged; adapters."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_logprobs
from fakes.rank_bench import Trained, make_batches, train
from torch.autograd import graph
from transformers import AutoModelForCausalLM

from umbra.proto.errors import UsageError
from umbra.proto.records import Trajectory
from umbra.services.config import TrainerConfig
from umbra.services.modeling.lora import low_rank
from umbra.services.modeling.models import decoder_layers
from umbra.services.modeling.packing import pack
from umbra.services.modeling.weights import WeightTable
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.distributed import sharding
from umbra.services.trainer.distributed.ranks import Ranks
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import export_policy, load_policy, open_policy
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest

ADAMW = {"optimizer": "adamw", "betas": [0.9, 0.95], "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def batches() -> list[list[Trajectory]]:
    return make_batches(2)


@pytest.fixture(scope="module")
def plain(directory: Path, batches: list[list[Trajectory]]) -> Trained:
    return train(directory, batches, Ranks())


def assert_same(found: Trained, expected: Trained) -> None:
    for one, other in zip(found.rows, expected.rows, strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key
    assert found.weights.keys() == expected.weights.keys(), "the names stay as they are"
    for name, tensor in found.weights.items():
        torch.testing.assert_close(tensor, expected.weights[name], atol=1e-5, rtol=1e-4)


def test_all_layers_are_recomputed(
    directory: Path,
    batches: list[list[Trajectory]],
    plain: Trained,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    passes: list[int] = []
    forward = Qwen3DecoderLayer.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            passes.append(self.self_attn.layer_idx)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3DecoderLayer, "forward", counted)
    train(directory, batches, Ranks())
    once = passes.count(0)
    passes.clear()
    assert_same(train(directory, batches, Ranks(), activation_checkpointing=True), plain)
    for layer in (0, 1):
        assert passes.count(layer) == 2 * once, layer


@pytest.mark.filterwarnings("default")  # the compiler's warnings are not ours
@pytest.mark.parametrize("architecture", ["", "llama"])
@pytest.mark.parametrize("pack_tokens", [1, 512], ids=["alone", "packed"])
def test_a_layer_is_compiled_as_one_graph(
    architecture: str, pack_tokens: int, directory: Path, tmp_path: Path
) -> None:
    """Whatever breaks a graph costs a return to Python in each layer of each pass."""
    if architecture:
        directory = ARCHITECTURES[architecture].write(tmp_path / "model")
    learner = Learner(load_policy(directory)[0], TrainerConfig(device="cpu", threads=1), steps=1)
    batch = make_batch(make_batches(1)[0], 100)
    micro = pack(batch.tokens, pack_tokens=pack_tokens, micro_tokens=1000)[0]
    assert (micro.segment is not None) == (pack_tokens > 1)
    layer = decoder_layers(learner.model)[0]
    given: list[tuple[Any, Any]] = []
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True
    )
    learner.score(micro, batch.temperature[micro.source])
    hook.remove()
    args, kwargs = given[-1]  # the first are of the check of neighbours
    torch.compiler.reset()
    found = torch._dynamo.explain(layer.forward)(*args, **kwargs)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # the compiler's warnings are not ours
@pytest.mark.parametrize("recomputed", [False, True])
def test_compiled_layers_learn_the_same(
    directory: Path,
    batches: list[list[Trajectory]],
    recomputed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced and taken apart as for any compiler; kernels are those without one."""
    keys: dict[str, Any] = {"pack_tokens": 128, "micro_tokens": 512}
    dense = train(directory, batches, Ranks(), **keys)
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    keys |= {"compile": True, "activation_checkpointing": recomputed}
    found = train(directory, batches, Ranks(), **keys)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before, "something was compiled"
    assert_same(found, dense)


@pytest.mark.parametrize("architecture", ["", "qwen3-moe", "qwen2-moe", "deepseek-v3"])
def test_generators_get_the_policy_with_the_adapter_merged(
    directory: Path, batches: list[list[Trajectory]], tmp_path: Path, architecture: str
) -> None:
    """Published and exported weights give the logprobs that the trainer sees."""
    if architecture:
        directory = ARCHITECTURES[architecture].write(tmp_path / "model")
    model, tokenizer = load_policy(directory)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = TrainerConfig(lora_rank=4, learning_rate=0.02, warmup_steps=0, device="cpu")
    learner = Learner(model, config, steps=1)
    batch = make_batch(batches[0], model.config.vocab_size)
    micros = pack(batch.tokens, pack_tokens=64, micro_tokens=1000)

    def logprobs(learner: Learner) -> torch.Tensor:
        return learner.logprobs(micros, batch.temperature)

    untouched = Learner(load_policy(directory)[0], TrainerConfig(device="cpu"), steps=1)
    torch.testing.assert_close(logprobs(learner), logprobs(untouched), msg="B starts at zero")
    for _ in range(2):
        for micro in micros:
            found, _ = learner.score(micro, batch.temperature[micro.source])
            learner.backward(-found.mean())
        learner.update(0)
    trained = logprobs(learner)
    assert (trained - logprobs(untouched)).abs().max() > 0.1

    assert low_rank(learner.model).keys() == {
        name
        for name in before
        if name.removesuffix(".weight").endswith(("_proj", "_with_mqa"))
        or "shared_expert_gate" in name
    }
    for name, parameter in learner.model.named_parameters():
        if ".lora_B." in name:
            assert parameter.abs().max() > 0, name  # it has left its zero
        elif "lora" not in name:
            assert not parameter.requires_grad
            assert torch.equal(parameter, before[name.replace(".base_layer", "")]), name
    manifest = build_manifest(tensor_layout(learner.model, "float32"), 4096)
    sent = [entry.name for entry in manifest.tensors]
    assert [name for name in sent if name in before] == list(before), "and buffers"
    slot = memoryview(bytearray(manifest.total_bytes))
    write_shards(learner.model, manifest, slot)
    WeightTable(untouched.model).load(manifest, slot)
    assert_same_logprobs(logprobs(untouched), trained, untouched.model)

    export_policy(learner.model, tokenizer, tmp_path / "out", learner.weights())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    again = Learner(exported, TrainerConfig(device="cpu"), steps=1)
    assert_same_logprobs(logprobs(again), trained, untouched.model)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")  # peft says it as well
def test_adapters_that_cannot_be_are_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learner(**config: Any) -> Learner:
        return Learner(load_policy(directory)[0], TrainerConfig(device="cpu", **config), steps=1)

    few = learner(lora_rank=2, lora_targets=["q_proj"])
    names = [name for name, p in few.model.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2, "A and B in each of two layers"
    with pytest.raises(UsageError, match=r"trainer\.lora_targets: .*no_such_layer"):
        learner(lora_rank=2, lora_targets=["no_such_layer"])
    experts = load_policy(ARCHITECTURES["qwen3-moe"].write(tmp_path / "experts"))[0]
    known = (
        r"has no layer gate_proj; it has down_proj, gate_up_proj, k_proj, o_proj, q_proj, v_proj"
    )
    with pytest.raises(UsageError, match=known):
        Learner(
            experts, TrainerConfig(device="cpu", lora_rank=2, lora_targets=["gate_proj"]), steps=1
        )
    for shared in ("lm_head", "embed_tokens"):
        with pytest.raises(UsageError, match="share their weight"):
            learner(lora_rank=2, lora_targets=[shared])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"umbra-rl\[lora\]"):
        learner(lora_rank=2)


def same(one: Trained, other: Trained) -> bool:
    equal = (torch.equal(one.weights[name], other.weights[name]) for name in other.weights)
    return [row["loss"] for row in one.rows] == [row["loss"] for row in other.rows] and all(equal)


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offload_changes_nothing(
    directory: Path, batches: list[list[Trajectory]], offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[bool] = []

    class Counted(graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            passes.append(pin_memory)
            super().__init__(pin_memory)

    monkeypatch.setattr(sharding, "save_on_cpu", Counted)
    keys = {**ADAMW, "activation_checkpointing": True}
    plain = train(directory, batches, Ranks(), **keys)
    assert not passes
    found = train(directory, batches, Ranks(), **keys, offload=offload)
    assert same(found, plain)
    assert bool(passes) == (offload != "optimizer")


def test_bf16_learns_as_float32_does(directory: Path, batches: list[list[Trajectory]]) -> None:
    keys: dict[str, Any] = {"precision": "bf16"}
    plain = train(directory, batches, Ranks(), **keys)
    found = train(directory, batches, Ranks(), **keys, weights="bf16")
    for one, other in zip(found.rows, plain.rows, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=0.05, abs=0.01)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.05)
    start = load_policy(directory)[0].state_dict()
    for name, tensor in found.weights.items():
        moved = (tensor - start[name]).norm()
        assert (tensor - plain.weights[name]).norm() < 0.1 * moved + 1e-6, name


def test_steps_too_small_for_bf16_add_up(directory: Path) -> None:
    """The float32 copies are exported; rounded, they score and are published."""
    config = TrainerConfig(
        device="cpu", weights="bf16", precision="bf16", learning_rate=1e-6, warmup_steps=0
    )
    model, _, files = open_policy(directory)
    learner = Learner(model, config, 1, files=files)
    assert {p.dtype for p in learner.model.parameters()} == {torch.bfloat16}
    before = load_policy(directory)[0].state_dict()
    assert all(torch.equal(t, before[name]) for name, t in learner.weights().items()), "not rounded"
    for parameter in learner.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    learner._master_weights.collect()
    learner.update(0)
    for name, tensor in learner.weights().items():
        torch.testing.assert_close(tensor, before[name] - 1e-6, rtol=0, atol=2e-7)
        assert torch.equal(learner.model.get_parameter(name), tensor.bfloat16())


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"weights": "bf16"}, "trainer.weights = bf16 needs trainer.precision = bf16"),
        ({"offload": "all"}, "needs trainer.activation_checkpointing = true"),
        (
            {"compile": True, "activation_checkpointing": "selective"},
            "compile needs trainer.activation_checkpointing = true",
        ),
    ],
)
def test_what_auto_becomes_is_refused_too(directory: Path, keys: dict[str, Any], told: str) -> None:
    """On a CPU `auto` computes in float32 and recomputes nothing."""
    with pytest.raises(UsageError, match=told):
        Learner(load_policy(directory)[0], TrainerConfig(device="cpu", **keys), 1)
