"""Comparison of the trainer with Transformers: logprobs of packed rows, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from umbra.deploy.model_check.outcome import Row, difference, gradient_bound
from umbra.services.modeling.architectures import keeps_state
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.micro_batch import Tokens
from umbra.services.modeling.packing import pack
from umbra.services.modeling.reference import Expected, Reference
from umbra.services.modeling.scorer import Scorer

_PROMPTS = ((5, 4), (19, 3), (11, 1))  # tokens of each, and how many responses it has
_PACK_TOKENS = 96
_TEMPERATURE = 0.8  # of every second sequence

_MANY, _FEW = 1 << 20, 24
_LAYOUTS: tuple[tuple[str, int, bool, int], ...] = (
    # Tokens of a row, shared prompts, tokens whose logits are computed at a time.
    ("rows of one sequence", 1, False, _MANY),
    ("packed rows", _PACK_TOKENS, False, _MANY),
    ("packed rows, shared prompts", _PACK_TOKENS, True, _MANY),
    ("packed rows, logits in chunks", _PACK_TOKENS, True, _FEW),
)
_ALONE = (_LAYOUTS[0], ("rows of one sequence, logits in chunks", 1, False, _FEW))


def compare_training(policy: PreTrainedModel, reference: Reference) -> Iterator[Row]:
    """Rows about `policy`, as `load_policy` gives it, with the weights of `reference`."""
    embeddings: Any = policy.get_input_embeddings()
    tokens = _tokens(embeddings.num_embeddings)
    temperatures = torch.where(tokens.owner % 2 == 0, 1.0, _TEMPERATURE)
    weights = torch.randn(len(tokens.learned), generator=torch.Generator().manual_seed(3))
    expected, gradients = _reference(reference, tokens, weights)
    for name, pack_tokens, share, at_a_time in _ALONE if keeps_state(policy.config) else _LAYOUTS:
        policy.zero_grad()
        attention = Attention.prepare(policy, policy.device)
        scorer = Scorer(policy, at_a_time * 4 * embeddings.num_embeddings, attention).eval()
        found = torch.full((len(tokens.learned),), float("nan"))
        for micro in pack(
            tokens, pack_tokens=pack_tokens, micro_tokens=4 * _PACK_TOKENS, share_prompts=share
        ):
            logprobs, _ = scorer(micro, temperatures[micro.source], with_entropy=False)
            (logprobs * weights[micro.source]).sum().backward()
            found[micro.source] = logprobs.detach()
        yield difference(f"logprobs of {name}", found, expected, policy.config)
        yield _gradients(f"gradients of {name}", policy, gradients)
    policy.zero_grad()


def _tokens(vocabulary: int) -> Tokens:
    """Return prompts of several lengths with responses of 2 to 40 tokens."""
    generator = torch.Generator().manual_seed(1)
    ids: list[Tensor] = []
    rows: list[tuple[int, int, int]] = []  # tokens of prompt and response, and which prompt it is
    for family, (size, responses) in enumerate(_PROMPTS):
        prompt = torch.randint(vocabulary, (size,), generator=generator)
        for _ in range(responses):
            count = int(torch.randint(2, 40, (), generator=generator))
            ids += [prompt, torch.randint(vocabulary, (count,), generator=generator)]
            rows.append((size, count, family))
    prompts, counts, families = torch.tensor(rows).unbind(1)
    ends = (prompts + counts).cumsum(0)
    spans = zip((ends - counts).tolist(), ends.tolist(), strict=True)
    learned = [torch.arange(start, end) for start, end in spans]
    return Tokens(
        ids=torch.cat(ids),
        lengths=prompts + counts,
        learned=torch.cat(learned),
        owner=torch.arange(len(rows)).repeat_interleave(counts),
        prompts=prompts,
        family=families,
    )


def _reference(
    reference: Reference, tokens: Tokens, weights: Tensor
) -> tuple[Expected, dict[str, Tensor]]:
    """Return each sequence's logprobs, and the gradients of their weighted sum."""
    assert tokens.prompts is not None
    reference.model.zero_grad()
    found: list[Expected] = []
    counts = (tokens.lengths - tokens.prompts).tolist()
    for number, (ids, prompt, own) in enumerate(
        zip(
            tokens.ids.split(tokens.lengths.tolist()),
            tokens.prompts.tolist(),
            weights.split(counts),
            strict=True,
        )
    ):
        temperature = _TEMPERATURE if number % 2 else 1.0
        logprobs, scale = reference.logprobs(ids.tolist(), prompt, temperature)
        (logprobs * own).sum().backward()
        found.append(Expected(logprobs.detach(), scale))
    gradients = {
        name: parameter.grad
        for name, parameter in reference.model.named_parameters()
        if parameter.grad is not None
    }
    reference.model.zero_grad()
    return Expected(*(torch.cat(parts) for parts in zip(*found, strict=True))), gradients


def _gradients(name: str, policy: PreTrainedModel, expected: dict[str, Tensor]) -> Row:
    """Return the largest norm of a parameter's difference, in parts of the gradient's norm.

    Of its own, but at least a thousandth of the whole one: a gradient that cancels to nothing is
    all rounding.
    """
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    worst, at = torch.zeros(()), ""
    for parameter_name, parameter in policy.named_parameters():
        gradient = parameter.grad
        wanted = expected.get(parameter_name)
        if gradient is None and wanted is None:
            continue
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        wanted = torch.zeros_like(parameter) if wanted is None else wanted
        share = (gradient - wanted).norm() / torch.maximum(wanted.norm(), whole / 1000)
        if not share <= worst:
            worst, at = share, parameter_name
    bound = gradient_bound(policy.config)
    return Row(name, float(worst), bound, "of a norm", "" if worst <= bound else at)
