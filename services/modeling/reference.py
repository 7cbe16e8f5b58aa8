"""Plain Transformers, which everything else is compared with: one sequence at a time, in float32.

On the CPU, with eager attention: others leave out soft caps and the like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from umbra.services.modeling.architectures import cache_argument
from umbra.services.modeling.pretrained import AS_IT_IS, read_transformers_config

Weights = Mapping[str, Tensor]  # by their names in the model


class Expected(NamedTuple):
    """Logprobs [T] in nats, and the largest logit that was summed for each, [T]."""

    logprobs: Tensor
    scale: Tensor


class Reference:
    """The model in `directory`, which is trusted to be one."""

    def __init__(self, directory: Path) -> None:
        transformers_logging.disable_progress_bar()
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            config=read_transformers_config(directory),
            **AS_IT_IS,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()

    def logprobs(self, tokens: Sequence[int], first: int, temperature: float = 1.0) -> Expected:
        """Return logprobs of `tokens[first:]`, each after all before it; `first` is at least 1.

        They have a gradient if that is enabled.
        """
        logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0, first - 1 : -1]
        return _expected(logits / temperature, tokens[first:])

    @torch.no_grad()
    def changed(
        self, tokens: Sequence[int], first: int, read: int, old: Weights, new: Weights
    ) -> Expected:
        """Return `logprobs` as if weights changed in between and keys and values were kept.

        `tokens[:read]` are read with the weights `old`; all further ones with `new`, which see the
        keys and values that the others left. The model has the weights `new` afterwards.
        """
        arguments: Any = {cache_argument(self.model): DynamicCache(config=self.model.config)}
        parts: list[Tensor] = []
        position = 0
        # Token by token: with more than one, not every class goes on from a state.
        for weights, pieces in ((old, [tokens[:read]]), (new, [[t] for t in tokens[read:-1]])):
            self.load(weights)
            for piece in pieces:
                arguments["position_ids"] = torch.arange(position, position + len(piece))[None]
                output = self.model(torch.tensor([piece]), use_cache=True, **arguments)
                parts.append(output.logits[0])
                position += len(piece)
        return _expected(torch.cat(parts)[first - 1 :], tokens[first:])

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Take over `weights`; tied ones need one of their names."""
        places = self.model.state_dict()
        for name, tensor in weights.items():
            places[name].copy_(tensor)


def _expected(logits: Tensor, targets: Sequence[int]) -> Expected:
    logprobs = logits.float().log_softmax(-1)
    logprobs_of_targets = logprobs.gather(-1, torch.tensor(targets).unsqueeze(-1)).squeeze(-1)
    return Expected(logprobs_of_targets, logits.detach().abs().amax(-1))
