"""Drawing tokens, and the log-probability that each was really drawn with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from umbra.proto.records import Sampling


class Sampler:
    """Samples one token per row, each row with settings of its own.

    Order as in Transformers: temperature, top-k, top-p, min-p. Temperature 0 takes the most likely
    token and reports its logprob under the plain softmax. n rows, V tokens.
    """

    def __init__(self, slots: int, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device=device).manual_seed(seed)
        # One column per setting: temperature, top_k, top_p, min_p.
        self._settings = torch.zeros(slots, 4, device=device)
        self._plain = [True] * slots  # temperature only

    def set(self, rows: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Rows `rows` are sampled with `samplings` from now on."""
        values = [[s.temperature, float(s.top_k), s.top_p, s.min_p] for s in samplings]
        self._settings[list(rows)] = torch.tensor(values, device=self._settings.device)
        for row, s in zip(rows, samplings, strict=True):
            self._plain[row] = s.temperature > 0 and not s.top_k and s.top_p >= 1 and s.min_p <= 0

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rows `targets` take over the settings of rows `sources`."""
        self._settings[list(targets)] = self._settings[list(sources)]
        for source, target in zip(sources, targets, strict=True):
            self._plain[target] = self._plain[source]

    def sample(
        self, logits: torch.Tensor, rows: Sequence[int] | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n] and their logprobs [n] from `logits` [n, V] of rows `rows`."""
        settings = self._settings[rows if isinstance(rows, slice) else list(rows)]
        plain = self._plain[rows] if isinstance(rows, slice) else [self._plain[r] for r in rows]
        logits = logits.float()
        if all(plain):
            logprobs = torch.log_softmax(logits / settings[:, :1], dim=-1)
            tokens = self._draw(logprobs)
        else:
            greedy = settings[:, 0] <= 0
            temperature = torch.where(greedy, 1.0, settings[:, 0])
            logprobs = _restrict(logits / temperature[:, None], settings, greedy)
            tokens = torch.where(greedy, logits.argmax(dim=-1), self._draw(logprobs))
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def _draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(logprobs.exp(), 1, generator=self._generator)[:, 0]


def _restrict(logits: torch.Tensor, settings: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [n, V] after top-k, top-p and min-p; `greedy` rows [n] keep all tokens."""
    vocabulary = logits.shape[1]
    top_k, top_p, min_p = settings[:, 1].long(), settings[:, 2], settings[:, 3]
    ordered, order = torch.sort(logits, dim=-1, descending=True)
    ranks = torch.arange(vocabulary, device=logits.device)[None]
    kept = ranks < torch.where(top_k > 0, top_k, vocabulary)[:, None]
    probs = torch.softmax(ordered.masked_fill(~kept, -torch.inf), dim=-1)
    # Keep a token while the mass before it is below top_p: the first one that reaches it stays.
    kept &= (probs.cumsum(dim=-1) - probs < top_p[:, None]) | (top_p >= 1)[:, None]
    kept &= probs >= min_p[:, None] * probs[:, :1]
    kept |= greedy[:, None]
    kept[:, 0] = True
    allowed = torch.zeros_like(kept).scatter(1, order, kept)
    return torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), dim=-1)
