"""The scorer: logits in chunks, and models whose layers carry a state from token to token.

What each architecture computes is compared with Transformers in `test_architectures.py`.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_logprobs, assert_same_sums
from fakes.interrupted import CONTEXT, STOPS, TEMPERATURE, check_logprobs, roll
from fakes.packed_rows import samples
from torch import Tensor

from umbra.proto.errors import UsageError
from umbra.services.config import ModelConfig as ModelSection
from umbra.services.config import RunConfig, TrainerConfig
from umbra.services.generator.engines.torch_engine import TorchEngine
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.lora import low_rank
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.modeling.models import load_model
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer import critic as critic_module
from umbra.services.trainer.learner import Learner

MODELS = ("mamba2", "qwen3-next", "granite-hybrid", "nemotron-h")
AT_A_TIME = 3  # tokens; the last chunk has fewer
# Without anything after the output layer, with a factor, a divisor, and a soft cap.
TAILS = ("qwen3", "cohere", "granite", "gemma2")
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


def packed() -> MicroBatch:
    (micro,) = pack(TOKENS, pack_tokens=128, micro_tokens=256)
    return micro


def told() -> MicroBatch:
    """With 1 to 4 ids that could have been drawn, which are all that could of every other one."""
    micro = packed()
    count = len(micro.source)
    column = torch.arange(4)
    ids = (micro.targets[:, None] + 7 * column) % 60
    ids[column > torch.arange(count)[:, None] % 4] = -1
    return replace(micro, support=ids, whole=torch.arange(count) % 2 == 0)


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("name", TAILS)
def test_chunks_change_nothing(name: str, restricted: bool) -> None:
    model: Any = ARCHITECTURES[name].model()
    micro = told() if restricted else packed()
    temperature = torch.linspace(0.5, 1.5, len(micro.source))
    weights = torch.randn(2, len(micro.source), 5, generator=torch.Generator().manual_seed(2))
    found: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
    for scorer in (Scorer(model), Scorer(model, 4 * AT_A_TIME * model.config.vocab_size)):
        model.zero_grad()
        logprobs, entropy = scorer(
            micro, temperature, entropy_gradient=True, with_support=restricted
        )
        wide = logprobs.view(len(entropy), -1)
        weighted = (wide * weights[0][:, : wide.shape[1]]).sum(1) + entropy * weights[1][:, 0]
        weighted.sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((logprobs.detach(), entropy.detach(), gradients))
    (plain, plain_entropy, expected), (logprobs, entropy, gradients) = found
    assert_same_logprobs(logprobs, plain, model)
    assert_same_sums(entropy, plain_entropy, terms=model.config.vocab_size)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5 * scale)


def test_another_treatment_of_logits_is_refused() -> None:
    model: Any = ARCHITECTURES["qwen3"].model()

    class Louder(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.5
            return output

    model.__class__ = Louder
    with pytest.raises(UsageError, match="Louder changes its logits"):
        Scorer(model)(packed(), torch.ones(len(TOKENS.learned)))


# -- states: rows of one sequence, states by slot -------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_loaded_model_shows_that_its_sequences_need_rows(name: str) -> None:
    """Give the scorer attention layers alone: the first pass finds out that there are others."""
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
