"""Logprobs of the learned tokens of a micro-batch under a causal language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from umbra.services.modeling.attention import Attention
from umbra.services.modeling.packing import MicroBatch
from umbra.services.modeling.restrict import restrict


class Scorer(nn.Module):
    """A causal language model whose forward pass gives logprobs instead of logits.

    It is a module, and not a function, so that it can be what Accelerate prepares: everything that
    touches parameters happens inside one `forward`, as sharding and mixed precision require.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._attention = Attention.of(model.config)
        self._index: Tensor | None = None
        self._hidden: Tensor | None = None
        head = model.get_output_embeddings()
        assert head is not None, f"{type(model).__name__} has no output embeddings"
        head.register_forward_pre_hook(self._select)

    def forward(
        self,
        batch: MicroBatch,
        temperature: Tensor,
        *,
        with_entropy: bool = True,
        entropy_gradient: bool = False,
        sampling: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies in nats, float32 [N].

        Entropies are zeros unless `with_entropy`, and have a gradient only with `entropy_gradient`,
        which keeps another tensor of the logits' size.

        `temperature` [N] divides the logits, as it did when the tokens were sampled. With
        `sampling` (rows as of `restrict`, [N, 4]) logprobs are those of what top-k, top-p and min-p
        leave in, and finite for a token just outside of it too.
        """
        logits = self._run(batch).logits.float() / temperature.unsqueeze(-1)  # [N, V]
        self._hidden = None
        distribution = logits.log_softmax(-1)
        logprobs = distribution.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
        if sampling is not None:
            inside = restrict(logits, sampling, torch.zeros_like(sampling[:, :1], dtype=torch.bool))
            logprobs = logprobs - (inside.logsumexp(-1) - logits.logsumexp(-1))
        entropy = torch.zeros_like(logprobs)
        if with_entropy:
            with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
                entropy = -(distribution.exp() * distribution).sum(-1)
        return logprobs, entropy

    def hidden(self, batch: MicroBatch) -> Tensor:
        """What the output layer is given at the positions that predict a learned token, [N, H]."""
        self._run(batch)
        hidden, self._hidden = self._hidden, None
        assert hidden is not None
        return hidden

    def _run(self, batch: MicroBatch) -> Any:
        self._index = batch.index
        try:
            return self.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=batch.masks(self._attention, self.model.dtype),
                use_cache=False,
            )
        finally:
            self._index = None

    def _select(self, _head: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Let the head see only the positions that predict a learned token.

        Logits are the largest tensor of a step and prompts need none. A hook on the head keeps
        whatever the model's own forward does to logits afterwards (scaling, soft-capping).
        """
        if self._index is None:
            return None
        selected = args[0].flatten(0, 1)[self._index]
        self._hidden = selected.detach()
        return (selected, *args[1:])
