"""Logprobs of the learned tokens of a micro-batch under a causal language model."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from umbra.proto.errors import UsageError
from umbra.services.modeling.attention import Attention, neighbours
from umbra.services.modeling.experts import Routers
from umbra.services.modeling.micro_batch import MicroBatch
from umbra.services.modeling.sequence_parallel import SequenceGroup, SequenceParallel, SequenceShare

_NOTHING = -1e4  # log of a probability of 0, times which it is 0
_APART = 0.03  # nats: the same to the bit, but for experts, whose kernels may sum up otherwise


class ScoreOptions(TypedDict, total=False):
    """Options of `Scorer` besides logprobs."""

    with_entropy: bool  # True unless said; else entropies are zeros
    entropy_gradient: bool
    with_support: bool  # logprobs are [N, 1 + k]: of the learned token, then of `batch.support`
    balance: float  # what each token that is fed weighs in the routers' `balance_loss`


class _Request(NamedTuple):
    """The arguments of `Scorer.forward`."""

    batch: MicroBatch
    temperature: Tensor | None  # None: 1 throughout, and no division of the largest tensor
    how: ScoreOptions


class Scorer(nn.Module):
    """A causal language model whose forward pass gives logprobs instead of logits.

    Logits are the largest tensor of a step: a token of a vocabulary of 150,000 has 600 KB of them.
    So only positions that predict a learned token get any, `chunk_bytes` at a time, and the
    backward pass computes them once more. Logits that fit into one chunk are kept instead.

    Everything that touches parameters happens inside the model's own forward pass, as sharding and
    mixed precision require: hooks take the hidden states from the output layer and put logprobs in
    the place of logits.

    Args:
        model: on its device.
        chunk_bytes: of logits at a time.
        attention: as `Attention.prepare` has made it for `model`; None: the right one for it.
        group: ranks that share the tokens of each row; all are given the same micro-batches and
            get the same results.

    Raises UsageError in the first pass, if the model's class transforms its logits in an unknown
    way, or a sequence's logprobs depend on its neighbours; or if rows of it cannot be shared.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_bytes: int = 256 << 20,
        attention: Attention | None = None,
        group: SequenceGroup | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self._attention = attention or Attention.prepare(model, model.device)
        self._parallel = SequenceParallel(model, self._attention, group) if group else None
        self.routers = Routers.of(model)
        self._rows = max(1, chunk_bytes // (4 * model.config.get_text_config().vocab_size))
        self._request: _Request | None = None
        self._hidden: Tensor | None = None
        self._compared = False  # what we do to logits and what the model's class does
        # Sequence parallelism has a check of its own: all layers have to attend.
        self._probed = self._parallel is not None
        head = model.get_output_embeddings()
        assert head is not None, f"{type(model).__name__} has no output embeddings"
        head.register_forward_pre_hook(self._take_hidden)
        # Before FSDP's own hook, which has to see the tensors that gradients come back through.
        model.register_forward_hook(self._replace_logits, prepend=True)

    def forward(
        self, batch: MicroBatch, temperature: Tensor, **how: Unpack[ScoreOptions]
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies in nats, float32 [N].

        `temperature` [N], on the CPU, divides the logits, as it did when the tokens were sampled.
        Where the batch has all tokens that could have been drawn, both are of the distribution over
        these: recomputing these would be wrong at the boundary, where rounding swaps two tokens.
        The backward pass adds the gradients of the routers' balance loss, if it has a weight.
        """
        if not self._probed:
            self._probed = True
            self._check_neighbours(batch.input_ids.device)
        scale = temperature.to(batch.index.device) if (temperature != 1).any() else None
        if self._parallel is None:
            return self._run(_Request(batch, scale, how), batch)
        share = self._parallel.share(batch)
        scale = None if scale is None else scale[share.learned]
        request = _Request(share.own, scale, how)
        logprobs, entropy = self._run(request, share.rows, share)
        if how.get("with_entropy", True):
            return share.join(logprobs), share.join(entropy)
        return share.join(logprobs), entropy.new_zeros(len(batch.targets))

    @torch.no_grad()
    def _check_neighbours(self, device: torch.device) -> None:
        """Refuse a model that carries something from a sequence to the next one of its row."""
        words: int = self.model.config.get_text_config().vocab_size
        first, second = (
            self.forward(micro.to(device), torch.ones(len(micro.targets)))[0]
            for micro in neighbours(words, alone=self._attention.recurrent)
        )
        if (gap := float((first - second).abs().max())) > _APART:
            raise UsageError(
                f"model.path: in a {type(self.model).__name__} logprobs of a sequence depend on "
                f"what precedes it in its row (by {gap:.2g} nats): the model carries state that "
                "Umbra cannot separate, so it can't be trained; choose another model"
            )

    def _run(self, request: _Request, rows: MicroBatch, share: SequenceShare | None = None) -> Any:
        """Run `request`; attention sees `rows`, and this rank may hold a `share` of them."""
        self._request = request
        batch, routers = request.batch, self.routers
        if routers is not None:
            # It stays until the next pass: layers that are recomputed in the backward pass of this
            # one have to find the same.
            routing, fed, balance = batch.routing, batch.fed.flatten(), request.how.get("balance")
            routers.replay = None if routing is None else routing.flatten(0, 1)
            routers.balance = fed * balance if balance else None
            routers.counted = fed if torch.is_grad_enabled() else None
        elif batch.routing is not None:
            raise UsageError("model.path has no experts, but the samples have routing")
        try:
            forward = partial(
                self.model,
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=self._attention.express(rows.mask),
                use_cache=False,
            )
            if self._parallel is None or share is None:
                return forward()
            return self._parallel.run(share, forward)
        finally:
            self._request = self._hidden = None
            if routers is not None:
                routers.counted = None

    def _take_hidden(self, _head: nn.Module, args: tuple[Tensor, ...]) -> Any:
        """Keep the hidden states of learned tokens, and let the output layer see at most one."""
        if self._request is None or self._hidden is not None:
            return None
        self._hidden = args[0].flatten(0, 1)[self._request.batch.index]
        return (self._hidden[: 0 if self._compared else 1], *args[1:])

    def _replace_logits(self, model: nn.Module, _args: Any, output: Any) -> Any:
        """Put the requested logprobs in the place of logits."""
        request, hidden = self._request, self._hidden
        if request is None or hidden is None:
            return None
        if not self._compared and len(hidden):
            self._compare(hidden[:1], output.logits)
        batch, temperature = request.batch, request.temperature
        parts: list[Any] = []
        # All alike: CPUs add up a product of three rows ten times less exactly than one of seven.
        rows = -(-len(hidden) // max(1, -(-len(hidden) // self._rows)))
        for start in range(0, max(1, len(hidden)), max(1, rows)):
            chunk = slice(start, start + rows)
            columns = (hidden, batch.targets, temperature, batch.support, batch.whole)
            pieces = [None if column is None else column[chunk] for column in columns]
            score: Any = self._score
            if torch.is_grad_enabled() and len(hidden) > self._rows:
                score = partial(checkpoint, self._score, use_reentrant=False)
            parts.append(score(*pieces, request.how))
        logprobs, entropies = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def _score(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        support: Tensor | None,
        whole: Tensor | None,
        how: ScoreOptions,
    ) -> tuple[Tensor, Tensor]:
        logits = self._logits(hidden).float()  # [n, V]
        if temperature is not None:
            logits = logits / temperature.unsqueeze(-1)
        distribution = logits.log_softmax(-1)
        ids = targets.unsqueeze(-1)
        if support is not None:
            ids = torch.cat([ids, support.clamp(min=0)], 1)
        logprobs = distribution.gather(-1, ids)  # [n, 1 + k]
        outside: Tensor | None = None
        if support is not None and whole is not None:
            # No row is without any: the gradient of its sum would be NaN.
            outside = (support < 0) & whole.unsqueeze(-1)
            inside = logprobs[:, 1:].masked_fill(outside, -torch.inf).logsumexp(-1)
            logprobs = logprobs - torch.where(whole, inside, 0.0).unsqueeze(-1)
        entropy = logprobs.new_zeros(len(logprobs))
        if how.get("with_entropy", True):
            gradient = how.get("entropy_gradient", False)
            with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
                entropy = -(distribution.exp() * distribution).sum(-1)
                if outside is not None and whole is not None:
                    support_logprobs = logprobs[:, 1:].masked_fill(outside, _NOTHING)
                    terms = support_logprobs.exp() * support_logprobs
                    entropy = torch.where(whole, -terms.sum(-1), entropy)
        return logprobs if how.get("with_support") else logprobs[:, 0], entropy

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits [n, V] in the model's precision, with the transforms of known classes."""
        head: Any = self.model.get_output_embeddings()
        known = partial(getattr, self.model.config.get_text_config())
        logits = head(hidden)
        factor = known("logit_scale", None) or known("lm_head_multiplier", None) or 1.0
        if factor != 1:  # Cohere, Falcon-H1
            logits = logits * factor
        if (divisor := known("logits_scaling", None) or 1.0) != 1:  # Granite
            logits = logits / divisor
        if (cap := known("final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def _compare(self, hidden: Tensor, logits: Tensor) -> None:
        """Refuse a model whose forward pass makes other logits of `hidden` than we do."""
        expected = self._logits(hidden).flatten()
        if not torch.equal(expected.nan_to_num(), logits.flatten().to(expected.dtype).nan_to_num()):
            raise UsageError(
                f"model.path: {type(self.model).__name__} changes its logits in a way that Umbra "
                "does not compute, so it can't be trained; choose another model"
            )
        self._compared = True
