"""Models whose layers carry a state from token to token: rows of one sequence, states by slot.

What each architecture computes is compared with Transformers in `test_architectures.py`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_logprobs
from fakes.interrupted import CONTEXT, STOPS, TEMPERATURE, check_logprobs, roll
from fakes.packed_rows import samples
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.services.config import ModelConfig as ModelSection
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.lora import low_rank
from umbra.services.modeling.models import load_model
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer import critic as critic_module
from umbra.services.trainer.learner import Learner

MODELS = ("mamba2", "qwen3-next", "granite-hybrid", "nemotron-h")
STEPS = 3
TOKENS = samples([(9, 20, 3), (30, 3, 2), (1, 12, 1)])


def config(**keys: Any) -> TrainerConfig:
    return TrainerConfig(device="cpu", precision="no", **keys)


def one_by_one(model: Any) -> Tensor:
    """Logprobs of the learned tokens by plain forward passes."""
    parts: list[Tensor] = []
    for number, ids in enumerate(TOKENS.ids.split(TOKENS.lengths.tolist())):
        assert TOKENS.prompts is not None
        prompt = int(TOKENS.prompts[number])
        logits = model(ids[None], use_cache=False).logits[0, prompt - 1 : -1]
        parts.append(logits.log_softmax(-1).gather(1, ids[prompt:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("name", MODELS)
def test_the_loaded_model_shows_that_its_sequences_need_rows(name: str) -> None:
    """Whatever is known by its name."""
    model: Any = ARCHITECTURES[name].model()
    Attention.prepare(model, model.device)
    scorer = Scorer(model, attention=Attention(backend="sdpa"))  # as if all layers only attended
    micro, *_ = pack(TOKENS, pack_tokens=128, micro_tokens=256, share_prompts=True)
    with pytest.raises(UsageError, match="logprobs of a sequence depend on what precedes it"):
        scorer(micro, torch.ones(len(micro.targets)))


@pytest.mark.parametrize("name", MODELS)
def test_samples_that_one_engine_after_another_goes_on_with(name: str, tmp_path: Path) -> None:
    """With the logprobs of one forward pass, whose k3 is next to nothing."""
    directory = ARCHITECTURES[name].write(tmp_path / "model")
    model = load_model(directory, torch.device("cpu"), torch.float32)

    def engine(version: int) -> TorchEngine:
        return TorchEngine(
            model, stop_ids=STOPS, slots=5, max_context=CONTEXT, seed=version, version=version
        )

    check_logprobs(model, roll(engine, directory, TEMPERATURE, random.Random(1)))


@pytest.mark.parametrize("name", [*MODELS, "mamba"])
def test_an_adapter_is_what_its_merged_weights_are(name: str) -> None:
    learner = Learner(ARCHITECTURES[name].model(), config(lora_rank=2, micro_tokens=128), STEPS)
    assert learner.rows.pack_tokens == 1
    micros = learner.pack(TOKENS)
    assert all(micro.segment is None for micro in micros)
    assert any(micro.tokens < micro.input_ids.numel() for micro in micros), "some rows are padded"
    layers = low_rank(learner.model)
    for step in range(STEPS):
        for micro in micros:
            learner.backward(learner.score(micro, torch.ones(len(micro.targets)))[0].sum())
        learner.update(step)
    assert all(bool(layer.b.any()) for layer in layers.values()), "all of them learn"
    merged: Any = ARCHITECTURES[name].model()
    merged.load_state_dict(learner.weights(), strict=False)
    found = learner.logprobs(micros, torch.ones(len(TOKENS.learned)))
    with torch.no_grad():
        assert_same_logprobs(found, one_by_one(merged), merged)


def test_a_critic_that_needs_rows_is_refused_where_the_policy_packs(tmp_path: Path) -> None:
    learner = Learner(ARCHITECTURES["qwen3"].model(), config(), STEPS)
    run = RunConfig(model=ModelSection(path=str(ARCHITECTURES["mamba2"].write(tmp_path / "m"))))
    with pytest.raises(UsageError, match="choose one whose layers only attend"):
        critic_module.Critic(run, learner)
