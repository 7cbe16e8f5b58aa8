"""An engine of our own: continuous batching over KV slots, around an unmodified Transformers model.

A poll refills free slots from the queue (one forward pass over the new rows, left-padded), then
decodes one token of every live row. Rows that finish are replaced by queued ones, or by the last
live rows, so that the live rows stay `[0, n)` and attention is trimmed to the longest of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from umbra.proto.records import Manifest, VersionSpan
from umbra.services.generator.engine import EngineOutput, EngineRequest, FinishReason, KvPolicy
from umbra.services.generator.sampler import Sampler
from umbra.services.generator.slots import SlotCache
from umbra.services.modeling.weights import WeightTable

_PREFILL_TOKENS = 16384  # padded tokens per prefill pass, so that its memory stays bounded


@dataclass(slots=True)
class _Row:
    """A request and what was generated for it so far."""

    request: EngineRequest
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    version: int = -1  # of the tokens from `since` on
    since: int = 0

    def serve(self, version: int) -> None:
        """Tokens from here on are of `version`."""
        self._close_span()
        self.version, self.since = version, len(self.tokens)

    def peek(self) -> EngineOutput:
        self._close_span()
        name = self.request.request_id
        return EngineOutput(name, self.tokens[:], self.logprobs[:], self.spans[:], "abort")

    def output(self, reason: FinishReason) -> EngineOutput:
        self._close_span()
        return EngineOutput(self.request.request_id, self.tokens, self.logprobs, self.spans, reason)

    def _close_span(self) -> None:
        if len(self.tokens) > self.since:
            self.spans.append(
                VersionSpan(version=self.version, start=self.since, end=len(self.tokens))
            )
            self.since = len(self.tokens)


class TorchEngine:
    """The `Engine` for CPUs, and for GPUs without vLLM. S slots, n live rows, V tokens."""

    def __init__(
        self,
        model: Any,
        *,
        stop_ids: Iterable[int],
        slots: int,
        max_context: int,
        seed: int = 0,
        version: int = -1,
    ) -> None:
        self.version = version
        self.slots = slots
        self.max_context = max_context
        self.decoded_tokens = 0
        self._model = model.eval()
        self._device: torch.device = model.device
        self._stop_ids = frozenset(stop_ids)
        self._weights = WeightTable(model)
        self._cache = SlotCache(slots, max_context)
        self._sampler = Sampler(slots, self._device, seed)
        self._queue: deque[_Row] = deque()
        self._rows: list[_Row] = []  # the live ones, by slot
        # Of each row, the token that is sampled but not yet in the cache, and its position.
        self._last_tokens = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._positions = torch.zeros(slots, dtype=torch.long, device=self._device)
        self._outputs: list[EngineOutput] = []

    @property
    def live(self) -> int:
        """Sequences being decoded."""
        return len(self._rows)

    @property
    def free(self) -> int:
        """Slots that neither a live nor a queued request will take."""
        return max(0, self.slots - len(self._rows) - len(self._queue))

    @property
    def busy(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._rows or self._queue or self._outputs)

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        """Queue `requests`; each takes a slot as soon as one is free."""
        for request in requests:
            room = self.max_context - len(request.prompt_ids)
            if not request.prompt_ids or room < 1 or request.max_tokens < 1:
                raise ValueError(
                    f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens and "
                    f"{request.max_tokens} new ones do not fit a context of {self.max_context}"
                )
            self._queue.append(_Row(request, limit=min(request.max_tokens, room)))

    @torch.inference_mode()
    def poll(self, timeout_s: float = 0.0) -> list[EngineOutput]:
        """One decode step over all live rows, free slots refilled before; what finished in it.

        It never waits, so `timeout_s` has no effect.
        """
        self._refill()
        if self._rows:
            self._decode()
        outputs, self._outputs = self._outputs, []
        return outputs

    @torch.inference_mode()
    def load_weights(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, kv_policy: KvPolicy
    ) -> list[EngineOutput]:
        """Serve `version` from the next token on; see `Engine.load_weights`."""
        self._weights.load(tensors)
        return self._serve(version, kv_policy)

    @torch.inference_mode()
    def load_buckets(
        self,
        manifest: Manifest,
        buckets: Iterable[tuple[int, memoryview]],
        version: int,
        kv_policy: KvPolicy,
    ) -> list[EngineOutput]:
        """Serve `version` from the next token on; see `StreamingEngine.load_buckets`."""
        self._weights.load_buckets(manifest, buckets)
        return self._serve(version, kv_policy)

    def _serve(self, version: int, kv_policy: KvPolicy) -> list[EngineOutput]:
        """The weights are those of `version` now; what becomes of sequences under way."""
        self.version = version
        if kv_policy == "abort":
            aborted = [row.output("abort") for row in self._rows]
            self._rows.clear()
            return aborted
        for row in self._rows:
            row.serve(version)
        if kv_policy == "recompute":
            # The last sampled token is not in the cache: the next decode step brings it there.
            self._prefill(
                list(range(len(self._rows))),
                [[*row.request.prompt_ids, *row.tokens[:-1]] for row in self._rows],
            )
        return []

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        """End these requests (None: all) now; returns what there is of them."""
        wanted = None if request_ids is None else set(request_ids)

        def hit(row: _Row) -> bool:
            return wanted is None or row.request.request_id in wanted

        holes = [slot for slot, row in enumerate(self._rows) if hit(row)]
        aborted = [self._rows[slot].output("abort") for slot in holes]
        aborted += [row.output("abort") for row in self._queue if hit(row)]
        self._queue = deque(row for row in self._queue if not hit(row))
        self._close_holes(holes)
        return aborted

    def peek(self) -> list[EngineOutput]:
        """What there is so far of every live row; see `Engine.peek`."""
        return [row.peek() for row in self._rows]

    def close(self) -> None:
        """Free what the engine holds."""
        self._rows.clear()
        self._queue.clear()
        self._cache = SlotCache(self.slots, self.max_context)

    def _refill(self) -> None:
        """Move queued requests into free slots and sample the first token of each."""
        count = min(len(self._queue), self.slots - len(self._rows))
        if count == 0:
            return
        slots = list(range(len(self._rows), len(self._rows) + count))
        rows = [self._queue.popleft() for _ in slots]
        self._rows += rows
        for row in rows:
            row.serve(self.version)
        self._sampler.set(slots, [row.request.sampling for row in rows])
        sequences = [row.request.prompt_ids for row in rows]
        logits = self._prefill(slots, sequences)
        tokens, logprobs = self._sampler.sample(logits, slots)
        self._last_tokens[slots] = tokens
        self._positions[slots] = torch.tensor([len(s) for s in sequences], device=self._device)
        self._append(slots, tokens, logprobs)

    def _decode(self) -> None:
        """Feed every live row its last token and sample the next."""
        count = len(self._rows)
        columns = max(len(row.request.prompt_ids) + len(row.tokens) for row in self._rows)
        positions = self._positions[:count]
        self._cache.begin_decode(positions, columns)
        mask = torch.arange(columns, device=self._device)[None] <= positions[:, None]
        logits = self._model(
            input_ids=self._last_tokens[:count, None],
            position_ids=positions[:, None],
            attention_mask=mask[:, None, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        tokens, logprobs = self._sampler.sample(logits, slice(0, count))
        self._last_tokens[:count] = tokens
        self._positions[:count] += 1
        self._append(range(count), tokens, logprobs)

    def _prefill(self, slots: Sequence[int], sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read whole sequences into `slots`; logits [len(slots), V] of each one's next token.

        Equal sequences, which the samples of a group begin with, are computed once.
        """
        takers: dict[tuple[int, ...], list[int]] = {}
        for index, sequence in enumerate(sequences):
            takers.setdefault(tuple(sequence), []).append(index)
        # Longest first, so that a pass pads little.
        different = sorted(takers, key=len, reverse=True)
        logits: list[torch.Tensor] = []
        order: list[int] = []
        while different:
            count = max(1, _PREFILL_TOKENS // len(different[0]))
            chosen, different = different[:count], different[count:]
            which = [u for u, sequence in enumerate(chosen) for _ in takers[sequence]]
            indices = [index for sequence in chosen for index in takers[sequence]]
            logits.append(self._prefill_pass(chosen, [slots[i] for i in indices], which))
            order += indices
        if not order:
            return torch.empty(0, 0, device=self._device)
        return torch.cat(logits)[torch.tensor(order, device=self._device).argsort()]

    def _prefill_pass(
        self, sequences: Sequence[Sequence[int]], slots: Sequence[int], which: Sequence[int]
    ) -> torch.Tensor:
        """One forward pass over left-padded sequences [u, P]; next-token logits [m, V].

        Slot `slots[i]` gets sequence `which[i]`, both [m].
        """
        longest = max(len(s) for s in sequences)
        padded = [[0] * (longest - len(s)) + list(s) for s in sequences]
        padding = torch.tensor([longest - len(s) for s in sequences], device=self._device)
        index = torch.arange(longest, device=self._device)
        valid = index[None] >= padding[:, None]
        # Padding attends to itself: a row of the mask without any True would give NaN.
        causal = index[None] <= index[:, None]
        mask = (causal[None] & valid[:, None, :]) | (index[None] == index[:, None])[None]
        takers = torch.tensor(which, device=self._device)
        self._cache.begin_prefill(valid, torch.tensor(slots, device=self._device), takers)
        logits = self._model(
            input_ids=torch.tensor(padded, device=self._device),
            position_ids=(index[None] - padding[:, None]).clamp(min=0),
            attention_mask=mask[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return logits[takers]

    def _append(self, slots: Sequence[int], tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Note the new tokens of `slots`; rows that are done leave."""
        done: list[int] = []
        new = zip(slots, tokens.tolist(), logprobs.tolist(), strict=True)
        for slot, token, logprob in new:
            row = self._rows[slot]
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if token in self._stop_ids:
                self._outputs.append(row.output("stop"))
                done.append(slot)
            elif len(row.tokens) >= row.limit:
                self._outputs.append(row.output("length"))
                done.append(slot)
        self.decoded_tokens += len(slots)
        self._close_holes(done)

    def _close_holes(self, holes: Sequence[int]) -> None:
        """Remove rows `holes` (ascending); the last live rows take the places that get free."""
        if not holes:
            return
        count = len(self._rows) - len(holes)
        gone = set(holes)
        targets = [slot for slot in holes if slot < count]
        sources = [slot for slot in range(count, len(self._rows)) if slot not in gone]
        if targets:
            for source, target in zip(sources, targets, strict=True):
                self._rows[target] = self._rows[source]
            length = max(
                len(self._rows[t].request.prompt_ids) + len(self._rows[t].tokens) for t in targets
            )
            self._cache.move(sources, targets, min(length, self._cache.columns))
            self._sampler.move(sources, targets)
            self._last_tokens[targets] = self._last_tokens[sources]
            self._positions[targets] = self._positions[sources]
        del self._rows[count:]
