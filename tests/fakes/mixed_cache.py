"""Logprobs computed once more, by plain Transformers, as an engine with a KV policy must have."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from umbra.services.generator.engines.engine import EngineOutput


@torch.inference_mode()
def logprobs_keeping_cache(
    models: Mapping[int, Any], prompt: Sequence[int], output: EngineOutput
) -> list[float]:
    """Of each sampled token, where keys and values of earlier tokens stay what they were.

    A token's keys and values are computed when the next token is sampled, by the weights of then.
    """
    tokens = [*prompt, *output.token_ids]
    cache, seen, found = DynamicCache(), 0, []
    for span in output.spans:
        until = len(prompt) + span.end - 1  # the last token that was fed under these weights
        logits = models[span.version](
            input_ids=torch.tensor([tokens[seen:until]]), past_key_values=cache, use_cache=True
        ).logits[0, -(span.end - span.start) :]
        targets = torch.tensor(output.token_ids[span.start : span.end])
        found += logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
        seen = until
    return found


@torch.inference_mode()
def logprobs_recomputing_cache(
    models: Mapping[int, Any], prompt: Sequence[int], output: EngineOutput
) -> list[float]:
    """Of each sampled token, all of the sequence before it read by the token's own weights."""
    tokens = torch.tensor([[*prompt, *output.token_ids]])
    found: list[float] = []
    for span in output.spans:
        first, last = len(prompt) + span.start, len(prompt) + span.end
        logits = models[span.version](input_ids=tokens[:, :last]).logits[0, first - 1 : last - 1]
        targets = tokens[0, first:last]
        found += logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].tolist()
    return found
