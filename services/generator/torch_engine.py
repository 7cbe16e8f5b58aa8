"""An engine of our own: continuous batching over KV slots, around an unmodified Transformers model.

A poll refills free slots from the queue (one forward pass over the new rows, left-padded), then
decodes one token of every live row. Rows that finish are replaced by queued ones, or by the last
live rows, so that the live rows stay `[0, n)` and attention is trimmed to the longest of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from umbra.proto.errors import UsageError
from umbra.proto.records import Manifest, Routing, VersionSpan
from umbra.services.generator.engine import (
    EngineError,
    EngineOutput,
    EngineRequest,
    FinishReason,
    KvPolicy,
    check_request,
)
from umbra.services.generator.sampler import Sampler
from umbra.services.generator.slots import SlotCache
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.experts import NO_ROUTERS, Routers, check_routing_fits
from umbra.services.modeling.weights import WeightTable
from umbra.services.runtime.weights.manifest import Part

_PREFILL_TOKENS = 16384  # padded tokens per prefill pass, so that its memory stays bounded


@dataclass(slots=True)
class _Row:
    """A request and what was generated for it so far."""

    request: EngineRequest
    limit: int
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    version: int = -1  # of the tokens from `since` on
    since: int = 0
    routing: Routing | None = None  # without its tokens' experts; None: it is not told
    chosen: bytearray = field(default_factory=bytearray)  # of all tokens that were read

    def serve(self, version: int) -> None:
        """Tokens from here on are of `version`."""
        self._close_span()
        self.version, self.since = version, len(self.tokens)

    def peek(self) -> EngineOutput:
        self._close_span()
        name = self.request.request_id
        return EngineOutput(
            name, self.tokens[:], self.logprobs[:], self.spans[:], "abort", self._routing()
        )

    def output(self, reason: FinishReason) -> EngineOutput:
        self._close_span()
        return EngineOutput(
            self.request.request_id,
            self.tokens,
            self.logprobs,
            self.spans,
            reason,
            self._routing(),
        )

    def _routing(self) -> Routing | None:
        return self.routing and replace(self.routing, chosen=bytes(self.chosen))

    def _close_span(self) -> None:
        if len(self.tokens) > self.since:
            self.spans.append(
                VersionSpan(version=self.version, start=self.since, end=len(self.tokens))
            )
            self.since = len(self.tokens)


class TorchEngine:
    """The `Engine` for CPUs, and for GPUs without vLLM. S slots, n live rows, V tokens.

    `weights` says where versions go, if that is not all of `model`.
    """

    def __init__(
        self,
        model: Any,
        *,
        stop_ids: Iterable[int],
        slots: int,
        max_context: int,
        seed: int = 0,
        version: int = -1,
        tell_routing: bool = False,
        weights: WeightTable | None = None,
    ) -> None:
        self.version = version
        self.slots = slots
        self.max_context = max_context
        self.decoded_tokens = 0
        self._model = model.eval()
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._stop_ids = frozenset(stop_ids)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._attention = Attention.of(model.config)
        self._weights = weights or WeightTable(model)
        self._routers = Routers.of(model) if tell_routing else None
        self._routing: Routing | None = None
        if tell_routing and self._routers is None:
            raise UsageError(NO_ROUTERS)
        if self._routers is not None:
            layers, choices, experts = self._routers.kind
            check_routing_fits(self._routers.kind, max_context)
            self._routing = Routing(layers=layers, choices=choices, experts=experts, chosen=b"")
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
            limit = check_request(request, self.max_context, self._vocabulary)
            stops = self._stop_ids | request.stop_ids
            self._queue.append(_Row(request, limit, stops, routing=self._routing))

    @torch.inference_mode()
    def poll(self, timeout_s: float = 0.0) -> list[EngineOutput]:
        """One decode step over all live rows, free slots refilled before; what finished in it.

        It never waits, so `timeout_s` has no effect.

        Raises:
            EngineError: torch failed, or the logits are not finite.
        """
        with self._failing():
            self._refill()
            if self._rows:
                self._decode()
        outputs, self._outputs = self._outputs, []
        return outputs

    @torch.inference_mode()
    def load(
        self, manifest: Manifest, parts: Iterable[Part], version: int, kv_policy: KvPolicy
    ) -> list[EngineOutput]:
        """Serve `version` from the next token on; see `Engine.load`."""
        self._weights.load(manifest, parts)
        self.version = version
        if kv_policy == "abort":
            aborted = [row.output("abort") for row in self._rows]
            self._rows.clear()
            return aborted
        for row in self._rows:
            row.serve(version)
        if kv_policy == "recompute":
            # The last sampled token is not in the cache: the next decode step brings it there.
            sequences = [[*row.request.prompt_ids, *row.tokens[:-1]] for row in self._rows]
            with self._failing():
                self._prefill(list(range(len(self._rows))), sequences, first=False)
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

    def peek(self, at_least: Mapping[str, int]) -> list[EngineOutput]:
        """What there is of the live rows that have so many tokens; see `Engine.peek`."""
        never = self.max_context + 1
        return [
            row.peek()
            for row in self._rows
            if len(row.tokens) >= at_least.get(row.request.request_id, never)
        ]

    def close(self) -> None:
        """Free what the engine holds."""
        self._rows.clear()
        self._queue.clear()
        self._cache = SlotCache(self.slots, self.max_context)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Name the engine in what goes wrong inside of torch."""
        try:
            yield
        except RuntimeError as error:  # out of memory, a lost device, a kernel that failed
            first = str(error).partition("\n")[0]
            raise EngineError(
                f"the torch engine failed on {self._device} with {len(self._rows)} of {self.slots} "
                f"slots in use: {type(error).__name__}: {first}"
            ) from error

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
        # What is added to attention scores: of a boolean mask every layer would make that anew.
        held = torch.arange(columns, device=self._device)[None]
        latest = positions[:, None]
        mask = self._attention.masks(
            (held <= latest)[:, None], latest, held, self._dtype, additive=True
        )
        logits = self._pass(
            input_ids=self._last_tokens[:count, None],
            position_ids=positions[:, None],
            attention_mask=mask,
        )
        for row, chosen in zip(self._rows, self._chosen(count), strict=False):
            row.chosen += chosen
        tokens, logprobs = self._sampler.sample(logits, slice(0, count))
        self._last_tokens[:count] = tokens
        self._positions[:count] += 1
        self._append(range(count), tokens, logprobs)

    def _prefill(
        self, slots: Sequence[int], sequences: Sequence[Sequence[int]], *, first: bool = True
    ) -> torch.Tensor:
        """Read whole sequences into `slots`; logits [len(slots), V] of each one's next token.

        Equal sequences, which the samples of a group begin with, are computed once. The routing of
        tokens that are read again, not for the `first` time, is not noted.
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
            rows = [slots[i] for i in indices]
            logits.append(self._prefill_pass(chosen, rows, which))
            if first:
                self._note_prompts(chosen, rows, which)
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
        lengths = [len(s) for s in sequences]
        longest = max(lengths)
        padded = [[0] * (longest - len(s)) + list(s) for s in sequences]
        self._cache.begin_prefill(lengths, slots, which, self._device)
        padding = longest - torch.tensor(lengths, device=self._device)
        index = torch.arange(longest, device=self._device)
        valid = index[None] >= padding[:, None]
        # Padding attends to itself: a row of the mask without any True would give NaN.
        causal = index[None] <= index[:, None]
        seen = (causal[None] & valid[:, None, :]) | (index[None] == index[:, None])[None]
        columns = index[None]  # padding moves queries and keys alike
        logits = self._pass(
            input_ids=torch.tensor(padded, device=self._device),
            position_ids=(index[None] - padding[:, None]).clamp(min=0),
            attention_mask=self._attention.masks(seen, columns, columns, self._dtype),
            logits_to_keep=1,
        )
        return logits[torch.tensor(which, device=self._device)]

    def _pass(self, **inputs: Any) -> torch.Tensor:
        """Logits [rows, V] of each row's next token; its routing can be asked for next."""
        if self._routers is not None:
            self._routers.noted = []
        return self._model(**inputs, past_key_values=self._cache, use_cache=True).logits[:, -1]

    def _note_prompts(
        self, sequences: Sequence[Sequence[int]], slots: Sequence[int], which: Sequence[int]
    ) -> None:
        """The rows in `slots` begin with the routing of the left-padded pass just made."""
        found = list(self._chosen(len(sequences)))
        if not found or self._routing is None:
            return
        size = self._routing.token_bytes
        for slot, sequence in zip(slots, which, strict=True):
            own = len(sequences[sequence]) * size
            self._rows[slot].chosen += found[sequence][-own:]

    def _chosen(self, rows: int) -> Iterator[bytes]:
        """The experts that the last pass chose for the tokens of each of `rows`, if that is told.

        The bytes are those of `Routing.chosen`.
        """
        if self._routers is None or self._routers.noted is None:
            return
        found = torch.stack(self._routers.noted, 1)  # [rows * tokens, layers, choices]
        kind = torch.uint8 if self._routers.experts <= 256 else torch.int16
        data = found.to(kind).cpu().numpy().tobytes()
        size = len(data) // rows
        for row in range(rows):
            yield data[row * size : (row + 1) * size]

    def _append(self, slots: Sequence[int], tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Note the new tokens of `slots`; rows that are done leave."""
        done: list[int] = []
        # One transfer, the only time in a step that a GPU is waited for; double holds both exactly.
        both = torch.stack((tokens.double(), logprobs.double())).tolist()
        if not math.isfinite(sum(both[1])):
            raise EngineError(
                f"the logits of version {self.version} are not finite: its weights are broken, or "
                "its numbers leave the range of their type"
            )
        for slot, number, logprob in zip(slots, *both, strict=True):
            row, token = self._rows[slot], int(number)
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if token in row.stop_ids:
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
