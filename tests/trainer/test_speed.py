"""Where the seconds of a step go, traces of chosen steps, and operations, counted and measured."""

import gzip
import json
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fakes.noisy_batch import noisy_trajectories
from torch.utils.flop_counter import FlopCounterMode

from umbra.services.config import TrainerConfig
from umbra.services.modeling.lora import add_adapter
from umbra.services.modeling.packing import pack
from umbra.services.trainer.batch import make_batch
from umbra.services.trainer.learner import Learner
from umbra.services.trainer.make_model import make_model
from umbra.services.trainer.metrics import peak_memory_gib, speed_metrics
from umbra.services.trainer.policy import load_policy
from umbra.services.trainer.speed import Phases, TrainingFlops, traced

CPU = torch.device("cpu")


def test_phases_add_up_to_the_step() -> None:
    """Between two readings of the clock pass 1, 2, 3, ... seconds."""
    clock = accumulate(range(100))
    phases = Phases(CPU, lambda: float(next(clock)))  # at 0
    with phases("wait"):  # from 1 to 3
        pass
    with phases("train"):  # from 6
        for _ in range(2):
            with phases("forward"):  # from 10 to 15, from 21 to 28
                pass
    # to 36; the step ends at 45
    assert phases.take() == {
        "wait": 2, "train": 30, "train/forward": 12, "train/other": 18, "other": 13, "step": 45,
    }  # fmt: skip
    assert phases.take() == {"other": 10, "step": 10}, "it restarts"


def ranges(path: Path) -> set[str]:
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


def test_a_trace_has_the_phases_of_its_step_alone(tmp_path: Path) -> None:
    phases, file = Phases(CPU), tmp_path / "profile" / "step-2.json.gz"
    for step in (1, 2, 3):
        with (
            traced(file) if step == 2 else nullcontext(),
            phases(f"train {step}"),
            phases("forward"),
        ):
            torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    assert ranges(file) == {"train 2", "forward"}


@pytest.mark.parametrize("shared", [False, True])
def test_it_is_what_torch_counts(shared: bool, tmp_path: Path) -> None:
    """Attention is little here, of which torch counts the masked half as well."""
    make_model(tmp_path / "model", hidden=64, ff=192)
    learner = Learner(load_policy(tmp_path / "model")[0], TrainerConfig(device="cpu", threads=1), 1)
    batch = make_batch(noisy_trajectories(learner.model, groups=2), 1000)
    counted = 0.0
    first = pack(batch.tokens, pack_tokens=32, micro_tokens=32)[0]
    learner.score(first, batch.temperature[first.source])  # which looks at neighbours too
    with FlopCounterMode(display=False) as measured:
        cost = learner.operations.sequence
        how: Any = {"pack_tokens": 32, "micro_tokens": 64, "share_prompts": shared, "cost": cost}
        for micro in pack(batch.tokens, **how):
            # Torch counts padding too.
            counted += micro.cost * micro.input_ids.numel() / micro.tokens
            logprobs, _ = learner.score(micro, batch.temperature[micro.source], with_entropy=False)
            learner.backward(logprobs.sum())
    assert counted == pytest.approx(measured.get_total_flops(), rel=0.1)


def test_a_sequence_alone_by_hand(tmp_path: Path) -> None:
    """Five tokens are fed of six; the keys that they attend to are 1 + 2 + 3 + 4 + 5."""
    make_model(tmp_path / "model")
    learner = Learner(load_policy(tmp_path / "model")[0], TrainerConfig(device="cpu", threads=1), 1)
    batch = make_batch(noisy_trajectories(learner.model, groups=1, size=1), 1000)
    cost = TrainingFlops(body=1000, head=100, attention=((None, 10),)).sequence
    (micro,) = pack(batch.tokens, pack_tokens=64, micro_tokens=64, cost=cost)
    fed, learned = micro.tokens, len(batch.behaviour)
    assert micro.segment is None
    keys = fed * (fed + 1) / 2
    assert micro.cost == 6 * 1000 * fed + 6 * 100 * learned + 12 * 10 * keys


def of(config: transformers.PreTrainedConfig) -> tuple[TrainingFlops, int]:
    """Return the cost of `config`, and its number of weights, without any in memory."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return TrainingFlops.of(model), sum(p.numel() for p in model.parameters())


def test_a_token_meets_some_experts_only() -> None:
    """Qwen3-30B-A3B, by hand: 8 of 128 experts of 3 x 2048 x 768 weights in each of 48 layers."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,  # pyright: ignore[reportCallIssue]
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    )
    cost, total = of(config)
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    norms = 2 * 2048 + 2 * 128
    layer = attention + norms + 128 * 2048 + 8 * 3 * 2048 * 768
    assert cost == TrainingFlops(
        body=48 * layer + 2048, head=151_936 * 2048, attention=((None, 48 * 32 * 128),)
    )
    assert total == pytest.approx(30.5e9, rel=0.01)
    assert cost.body + 2 * cost.head == pytest.approx(3.3e9, rel=0.02)  # as its authors count them


def test_a_token_meets_the_adapters_of_its_experts() -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    before = TrainingFlops.of(model)
    add_adapter(model, TrainerConfig(lora_rank=4, lora_targets=["experts.down_proj"]), 0)
    each = 4 * (32 + 64)
    assert TrainingFlops.of(model).body - before.body == config.num_hidden_layers * 2 * each


def test_shared_experts_and_dense_layers_are_met_by_every_token() -> None:
    """DeepSeek-V3 has 671B weights, of which a token meets 37B (arXiv 2412.19437)."""
    cost, total = of(transformers.DeepseekV3Config())
    assert total == pytest.approx(671e9, rel=0.001)
    assert cost.body + cost.head == pytest.approx(37e9, rel=0.02)
    latent = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    norms = 2 * 7168 + 1536 + 512
    dense, experts = 3 * 7168 * 18_432, 9 * 3 * 7168 * 2048 + 256 * 7168
    assert cost.body == 61 * (latent + norms) + 3 * dense + 58 * experts + 7168
    # A query and a key of 128 + 64 dimensions, a value of 128, in 128 heads.
    assert cost.attention == ((None, 61 * 128 * (192 + 128) / 2),)


def test_a_window_bounds_the_keys() -> None:
    """Gemma 3 has both kinds of layers."""
    cost, _ = of(
        transformers.Gemma3TextConfig(
            num_hidden_layers=3,
            num_attention_heads=4,
            head_dim=16,
            sliding_window=2,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        )
    )
    assert cost.attention == ((2, 128), (None, 64))
    keys = 64 * 9 * (9 + 1) / 2 + 128 * (2 * 9 - 1)
    assert cost.sequence(0, 9, 1) - 6 * (9 * cost.body + cost.head) == 12 * keys


def test_speed() -> None:
    assert speed_metrics(600.0, 8e12, 2.0, 16e12) == {
        "train_tokens_per_s": 300.0, "tflops": 4.0, "mfu": 0.25,
    }  # fmt: skip
    assert speed_metrics(600.0, 8e12, 2.0, 0.0)["mfu"] is None
    assert 0.01 < peak_memory_gib(torch.device("cpu")) < 1000
