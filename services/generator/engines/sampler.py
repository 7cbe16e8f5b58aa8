"""Drawing tokens, and the log-probability that each was really drawn with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from umbra.proto.records import Sampling
from umbra.services.modeling.restrict import restrict


class Sampler:
    """Samples one token per row, each row with settings of its own.

    Order as in Transformers: temperature, top-k, top-p, min-p. Temperature 0 takes the most likely
    token and reports its logprob under the plain softmax. n rows, V tokens.
    """

    def __init__(self, slots: int, device: torch.device, seed: int) -> None:
        self._generator = torch.Generator(device=device).manual_seed(seed)
        # One column per setting: temperature, top_k, top_p, min_p.
        self._settings = torch.zeros(slots, 4, device=device)
        self._restricted = [False] * slots  # by top-k, top-p or min-p
        self._greedy = [False] * slots

    def set(self, rows: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Rows `rows` are sampled with `samplings` from now on."""
        values = [[s.temperature, float(s.top_k), s.top_p, s.min_p] for s in samplings]
        self._settings[list(rows)] = torch.tensor(values, device=self._settings.device)
        for row, s in zip(rows, samplings, strict=True):
            self._greedy[row] = s.temperature <= 0
            self._restricted[row] = s.temperature > 0 and bool(
                s.top_k or s.top_p < 1 or s.min_p > 0
            )

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Rows `targets` take over the settings of rows `sources`."""
        self._settings[list(targets)] = self._settings[list(sources)]
        for source, target in zip(sources, targets, strict=True):
            self._greedy[target] = self._greedy[source]
            self._restricted[target] = self._restricted[source]

    def sample(
        self, logits: torch.Tensor, rows: Sequence[int] | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [n] and their logprobs [n] from `logits` [n, V] of rows `rows`."""
        index = range(len(self._greedy))[rows] if isinstance(rows, slice) else list(rows)
        settings = self._settings[rows if isinstance(rows, slice) else index]
        some_greedy = any(self._greedy[row] for row in index)
        logits = logits.float()
        temperature = settings[:, :1]
        greedy = temperature <= 0
        if some_greedy:
            temperature = torch.where(greedy, 1.0, temperature)
        scaled = logits / temperature
        if any(self._restricted[row] for row in index):
            scaled = restrict(scaled, settings, greedy)
        logprobs = torch.log_softmax(scaled, dim=-1)
        tokens = self._draw(logprobs)
        if some_greedy:
            tokens = torch.where(greedy[:, 0], logits.argmax(dim=-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def _draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Tokens [n] by inversion: one random number a row, where `multinomial` takes V.

        In double precision, so that unlikely tokens are not lost in the rounding of the sums.
        """
        sums = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        drawn = torch.empty_like(sums[:, :1]).uniform_(generator=self._generator)
        # A hair below the whole, for a product that rounds up to it would be past the last token.
        tokens = torch.searchsorted(sums, drawn * (1 - 1e-15) * sums[:, -1:], right=True)[:, 0]
        return tokens.clamp_(max=logprobs.shape[1] - 1)  # past it where the logits are NaN
