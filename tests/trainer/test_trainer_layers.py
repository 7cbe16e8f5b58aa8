"""Options of layers and of memory that leave a policy's learning unchanged; adapters."""

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_logprobs
from fakes.rank_bench import Trained, make_batches, train
from torch.autograd import graph
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from umbra.proto.errors import UsageError
from umbra.services.config import TrainerConfig
from umbra.services.modeling.lora import low_rank
from umbra.services.modeling.packing import pack
from umbra.services.modeling.weights import WeightTable
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.distributed import sharding
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.policy import export_policy, load_policy, open_policy
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest


@pytest.fixture(scope="module")
def learned(directory: Path) -> Any:
    """Return a function that learns from two batches with its settings."""
    return lambda **keys: train(directory, make_batches(2), **keys)


@pytest.fixture(scope="module")
def plain(learned: Any) -> Trained:
    return learned()


def assert_same(found: Trained, expected: Trained) -> None:
    for one, other in zip(found.rows, expected.rows, strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key
    assert found.weights.keys() == expected.weights.keys(), "the names stay as they are"
    for name, tensor in found.weights.items():
        torch.testing.assert_close(tensor, expected.weights[name], atol=1e-5, rtol=1e-4)


def test_all_layers_are_recomputed(
    learned: Any, plain: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    forward = Qwen3DecoderLayer.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            passes.append(self.self_attn.layer_idx)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3DecoderLayer, "forward", counted)
    learned()
    once = passes.count(0)
    passes.clear()
    assert_same(learned(activation_checkpointing=True), plain)
    assert passes.count(0) == passes.count(1) == 2 * once


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # the compiler's are not ours
@pytest.mark.parametrize(("recomputed", "pack_tokens"), [(False, 128), (True, 8)])
def test_compiled_layers_learn_the_same(
    learned: Any, recomputed: bool, pack_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced and taken apart as for any compiler; rows of several sequences, or of one: no mask.

    Anything that breaks a graph costs a return to Python in each layer of each pass.
    """
    keys: dict[str, Any] = {"pack_tokens": pack_tokens, "micro_tokens": 512}
    dense = learned(**keys)
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    counters = torch._dynamo.utils.counters
    counters.clear()
    found = learned(**keys, compile=True, activation_checkpointing=recomputed)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]
    assert_same(found, dense)


@pytest.mark.parametrize("architecture", ["", "qwen3-moe", "qwen2-moe", "deepseek-v3"])
def test_generators_get_the_policy_with_the_adapter_merged(
    directory: Path, tmp_path: Path, architecture: str
) -> None:
    """Published and exported weights give the logprobs that the trainer sees."""
    if architecture:
        directory = ARCHITECTURES[architecture].write(tmp_path / "model")
    model, tokenizer = load_policy(directory)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = TrainerConfig(lora_rank=4, learning_rate=0.02, warmup_steps=0, device="cpu")
    learner = Learner(model, config, steps=1)
    batch = make_batch(make_batches(1)[0], model.config.vocab_size)
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
    experts = ARCHITECTURES["qwen3-moe"].write(tmp_path / "experts")

    def learner(*targets: str, model: Path = directory) -> Learner:
        config = TrainerConfig(device="cpu", lora_rank=2, lora_targets=[*targets])
        return Learner(load_policy(model)[0], config, steps=1)

    names = [name for name, p in learner("q_proj").model.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2, "A and B in each of two layers"
    with pytest.raises(UsageError, match=r"trainer\.lora_targets: .*no_such_layer"):
        learner("no_such_layer")
    with pytest.raises(UsageError, match=r"no layer gate_proj; it has down_proj, gate_up_proj, k_"):
        learner("gate_proj", model=experts)
    with pytest.raises(UsageError, match="share their weight"):
        learner("lm_head")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"umbra-rl\[lora\]"):
        learner()


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offload_changes_nothing(
    learned: Any, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Mock(wraps=graph.save_on_cpu)
    monkeypatch.setattr(sharding, "save_on_cpu", passes)
    keys = {"optimizer": "adamw", "learning_rate": 1e-3, "activation_checkpointing": True}
    plain = learned(**keys)
    assert not passes.called
    found = learned(**keys, offload=offload)
    assert passes.called == (offload == "all")
    assert [row["loss"] for row in found.rows] == [row["loss"] for row in plain.rows]
    assert all(torch.equal(found.weights[name], t) for name, t in plain.weights.items())


def test_bf16_learns_as_float32_does(learned: Any, directory: Path) -> None:
    plain, found = (learned(precision="bf16", weights=name) for name in ("float32", "bf16"))
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


def test_what_auto_becomes_is_refused_too(directory: Path) -> None:
    """On a CPU `auto` computes in float32 and recomputes nothing."""
    selective = {"compile": True, "activation_checkpointing": "selective"}
    cases: dict[str, dict[str, Any]] = {
        "trainer.weights = bf16 needs trainer.precision = bf16": {"weights": "bf16"},
        "needs trainer.activation_checkpointing = true": {"offload": "all"},
        "compile needs trainer.activation_checkpointing = true": selective,
    }
    for told, keys in cases.items():
        with pytest.raises(UsageError, match=told):
            Learner(load_policy(directory)[0], TrainerConfig(device="cpu", **keys), 1)
