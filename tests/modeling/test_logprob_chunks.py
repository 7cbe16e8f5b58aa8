"""Logprobs, entropies and gradients are the same however many logits are computed at a time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_logprobs, assert_same_sums
from torch import Tensor
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.modeling.micro_batch import MicroBatch, Tokens
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer.policy import load_policy

AT_A_TIME = 3  # tokens; the last chunk has fewer
# Without anything after the output layer, with a factor, a divisor, and a soft cap.
TAILS = ("qwen3", "cohere", "granite", "gemma2")


@pytest.fixture(params=TAILS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return load_policy(ARCHITECTURES[request.param].write(tmp_path / "model"))[0].eval()


@pytest.fixture(scope="module")
def micro() -> MicroBatch:
    lengths = torch.tensor([9, 5, 17])
    learned = torch.tensor([4, 5, 6, 7, 8, 10, 12, 13, 20, 21, 22, 25, 28, 29, 30])[:14]
    owner = torch.bucketize(learned, lengths.cumsum(0), right=True)
    ids = torch.randint(5, 60, (31,), generator=torch.Generator().manual_seed(1))
    (micro,) = pack(Tokens(ids, lengths, learned, owner), pack_tokens=64, micro_tokens=64)
    return micro


def temperatures(micro: MicroBatch) -> Tensor:
    return torch.linspace(0.5, 1.5, len(micro.source))


def told(micro: MicroBatch) -> MicroBatch:
    """With 1 to 4 ids that could have been drawn, which are all that could of every other one."""
    count = len(micro.source)
    column = torch.arange(4)
    ids = (micro.targets[:, None] + 7 * column) % 60
    ids[column > torch.arange(count)[:, None] % 4] = -1
    return replace(micro, support=ids, whole=torch.arange(count) % 2 == 0)


@pytest.mark.parametrize("restricted", [False, True])
def test_chunks_change_nothing(model: PreTrainedModel, micro: MicroBatch, restricted: bool) -> None:
    temperature = temperatures(micro)
    micro = told(micro) if restricted else micro
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


@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_another_treatment_of_logits_is_refused(model: PreTrainedModel, micro: MicroBatch) -> None:
    class Louder(type(model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.5
            return output

    model.__class__ = Louder
    with pytest.raises(UsageError, match="Louder changes its logits"):
        Scorer(model)(micro, temperatures(micro))
