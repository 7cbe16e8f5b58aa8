"""Logprobs, entropies and gradients are the same however many logits are computed at a time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.architectures import ARCHITECTURES
from fakes.closeness import assert_same_logprobs, assert_same_sums
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.modeling.micro_batch import MicroBatch, Tokens
from umbra.services.modeling.packing import pack
from umbra.services.modeling.scorer import Scorer
from umbra.services.trainer.policy import load_policy

AT_A_TIME = 3  # tokens; the last chunk has fewer
# Without anything after the output layer, with a factor, a divisor, and a soft cap.
TAILS = ("qwen3", "cohere", "granite", "gemma2")


@pytest.fixture(scope="module", params=TAILS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    return load_policy(ARCHITECTURES[request.param].write(folder / "model"))[0].eval()


@pytest.fixture
def qwen(tmp_path: Path) -> Any:
    return load_policy(ARCHITECTURES["qwen3"].write(tmp_path / "model"))[0].eval()


@pytest.fixture(scope="module")
def micro() -> MicroBatch:
    lengths = torch.tensor([9, 5, 17])
    learned = torch.tensor([4, 5, 6, 7, 8, 10, 12, 13, 20, 21, 22, 25, 28, 29, 30])[:14]
    owner = torch.bucketize(learned, lengths.cumsum(0), right=True)
    ids = torch.randint(5, 60, (31,), generator=torch.Generator().manual_seed(1))
    (micro,) = pack(Tokens(ids, lengths, learned, owner), pack_tokens=64, micro_tokens=64)
    return micro


def chunked(model: PreTrainedModel, at_a_time: int = AT_A_TIME) -> Scorer:
    return Scorer(model, 4 * at_a_time * model.config.vocab_size)


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
    for scorer in (Scorer(model), chunked(model)):
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


def rows_of_logits(tensor: Any, model: PreTrainedModel) -> int:
    """How many rows `tensor` has, if it is as wide as the vocabulary and no weight [H, V]."""
    if not isinstance(tensor, Tensor) or tensor.dim() != 2:
        return 0
    rows, width = tensor.shape
    return rows if width == model.config.vocab_size and rows != model.config.hidden_size else 0


class Largest(TorchDispatchMode):
    """Notes the most rows of logits that anything makes."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.rows = 0
        self._model = model

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            self.rows = max(self.rows, rows_of_logits(one, self._model))
        return result


def test_no_more_than_a_chunk_of_logits_exists(qwen: PreTrainedModel, micro: MicroBatch) -> None:
    temperature, micro = temperatures(micro), told(micro)
    rows: list[int] = []
    for scorer in (Scorer(qwen), chunked(qwen)):
        with Largest(qwen) as largest:
            logprobs, entropy = scorer(micro, temperature, entropy_gradient=True)
            (logprobs.sum() + entropy.sum()).backward()
        rows.append(largest.rows)
    assert rows == [len(micro.source), AT_A_TIME]


def test_another_treatment_of_logits_is_refused(qwen: PreTrainedModel, micro: MicroBatch) -> None:
    class Louder(type(qwen)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.5
            return output

    qwen.__class__ = Louder
    with pytest.raises(UsageError, match="Louder changes its logits"):
        Scorer(qwen)(micro, temperatures(micro))
