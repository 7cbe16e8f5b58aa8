"""An engine of our own: continuous batching over KV slots, around an unmodified Transformers model.

A poll refills free slots from the queue (one forward pass over the new rows, left-padded), then
decodes one token of every live row. Rows that finish are replaced by queued ones, or by the last
live rows, so that the live rows stay `[0, n)` and attention is trimmed to the longest of them.
What a session's turn leaves in the cache is kept beside it, and the next turn reads what is new.
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
    CacheFigures,
    EngineError,
    EngineOutput,
    EngineRequest,
    FinishReason,
    KvPolicy,
    check_request,
)
from umbra.services.generator.kept_sessions import Kept, KeptSessions
from umbra.services.generator.lengths import RecentLengths
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

    @property
    def sequence(self) -> list[int]:
        return [*self.request.prompt_ids, *self.tokens]

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.tokens)

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

    `weights` says where versions go, if that is not all of `model`. `cache_tokens` limits the cache
    of keys and values, what is kept of sessions included; 0 = `max_context` for every slot, and as
    much again to be kept.

    Raises:
        UsageError: `cache_tokens` does not hold one sequence of `max_context`.
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
        cache_tokens: int = 0,
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
        capacity = cache_tokens or 2 * slots * max_context
        if capacity < max_context:
            raise UsageError(
                f"generator.kv_cache_mb holds {capacity} tokens of this model, fewer than one "
                f"sequence of generator.max_context = {max_context}: raise it, or lower that"
            )
        self._cache = SlotCache(slots, max_context, capacity)
        self._kept = KeptSessions()
        self._lengths = RecentLengths(max_context)
        self._asked_tokens = self._cached_tokens = self._preemptions = 0
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
    def fits(self) -> int:
        """Sequences for which there is cache: each takes as much as the longest; see `Engine`."""
        longest = max(self._longest, self._lengths.longest)
        return max(1, min(self.slots, self._cache.capacity // longest))

    @property
    def cache(self) -> CacheFigures:
        """Of its keys and values; each live sequence takes as much as the longest."""
        usage = len(self._rows) * self._longest / self._cache.capacity
        return CacheFigures(
            usage=min(1.0, usage),  # more for a moment, before a row makes room for the others
            asked_tokens=self._asked_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=self._preemptions,
        )

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
        if kv_policy != "keep":
            self._kept.clear()
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
                self._prefill(list(range(len(self._rows))), sequences)
        return []

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        """End these requests (None: all) now; returns what there is of them."""
        wanted = None if request_ids is None else set(request_ids)

        def hit(row: _Row) -> bool:
            return wanted is None or row.request.request_id in wanted

        holes = [slot for slot, row in enumerate(self._rows) if hit(row)]
        for slot in holes:
            self._keep(slot)
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

    def forget(self, session: str) -> None:
        """No more requests of this session come."""
        self._kept.forget(session)

    def close(self) -> None:
        """Free what the engine holds."""
        self._rows.clear()
        self._queue.clear()
        self._kept = KeptSessions()
        self._cache = SlotCache(self.slots, self.max_context, self._cache.capacity)

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
        """Move queued requests into free slots and sample the next token of each."""
        rows = self._admitted()
        if not rows:
            return
        slots = list(range(len(self._rows), len(self._rows) + len(rows)))
        self._rows += rows
        self._cache.reserve(len(self._rows), self._longest)
        self._kept.shrink(self._spare)
        for row in rows:
            row.serve(self.version)
        self._sampler.set(slots, [row.request.sampling for row in rows])
        sequences = [row.sequence for row in rows]
        held = [self._take_up(*pair) for pair in zip(slots, sequences, strict=True)]
        logits = self._read(slots, sequences, held)
        tokens, logprobs = self._sampler.sample(logits, slots)
        self._last_tokens[slots] = tokens
        self._positions[slots] = torch.tensor([len(s) for s in sequences], device=self._device)
        self._append(slots, tokens, logprobs)

    def _admitted(self) -> list[_Row]:
        """The queued rows for which there is a slot and room in the cache."""
        rows: list[_Row] = []
        longest = self._longest if self._queue else 0
        while self._queue and len(self._rows) + len(rows) < self.slots:
            longest = max(longest, self._queue[0].length + 1)
            if not self._cache.fits(len(self._rows) + len(rows) + 1, longest):
                break
            rows.append(self._queue.popleft())
        return rows

    @property
    def _longest(self) -> int:
        """Columns that the live rows need to get one more token."""
        return max((row.length + 1 for row in self._rows), default=0)

    @property
    def _spare(self) -> int:
        """Tokens of cache beside what rows have reserved."""
        return max(0, self._cache.capacity - self._cache.rows * self._cache.columns)

    def _take_up(self, slot: int, sequence: list[int]) -> int:
        """Put what is kept of the row's session into `slot`; how many tokens that are."""
        row = self._rows[slot]
        kept = self._kept.take(row.request.session)
        held = min(kept.shared(sequence), len(sequence) - 1) if kept is not None else 0
        if kept is not None and held:
            self._cache.put(slot, kept.states, held)
            if self._routing is not None and not row.chosen:
                row.chosen += kept.chosen[: held * self._routing.token_bytes]
        if not row.tokens:  # else it was counted before it made room for others
            self._asked_tokens += len(sequence)
            self._cached_tokens += held
        return held

    def _keep(self, slot: int) -> None:
        """Keep what `slot` holds for the next turn of its session, which ends here."""
        row = self._rows[slot]
        self._lengths.ended(row.length)
        session = row.request.session
        if not session or not self._kept.ended(session) or row.length - 1 > self._spare:
            return
        tokens = row.sequence[:-1]  # the last one is not in the cache
        states = self._cache.copy_of(slot, len(tokens))
        self._kept.keep(session, Kept(tokens, states, bytes(row.chosen)), self._spare)

    def _make_room(self) -> None:
        """Put rows back into the queue until the cache holds one more token of the others."""
        while not self._cache.fits(len(self._rows), self._longest):
            self._queue.appendleft(self._rows.pop())
            self._preemptions += 1

    def _decode(self) -> None:
        """Feed every live row its last token and sample the next."""
        self._make_room()
        count = len(self._rows)
        columns = self._longest - 1
        positions = self._positions[:count]
        self._cache.reserve(count, columns)
        self._kept.shrink(self._spare)
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

    def _read(
        self, slots: Sequence[int], sequences: Sequence[Sequence[int]], held: Sequence[int]
    ) -> torch.Tensor:
        """Logits [len(slots), V] of the next token; slots hold the first `held` ones already."""
        fresh = [i for i, count in enumerate(held) if not count]
        again = [i for i, count in enumerate(held) if count]
        logits: list[torch.Tensor] = []
        if fresh:
            different = {tuple(sequences[i]) for i in fresh}
            self._cached_tokens += sum(len(sequences[i]) for i in fresh) - sum(map(len, different))
            logits.append(self._prefill([slots[i] for i in fresh], [sequences[i] for i in fresh]))
        while again:
            count = max(1, _PREFILL_TOKENS // max(len(sequences[i]) for i in again))
            these, again = again[:count], again[count:]
            known = [held[i] for i in these]
            logits.append(
                self._extend([slots[i] for i in these], [sequences[i] for i in these], known)
            )
        order = fresh + [i for i, count in enumerate(held) if count]
        return torch.cat(logits)[torch.tensor(order, device=self._device).argsort()]

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
            rows = [slots[i] for i in indices]
            logits.append(self._prefill_pass(chosen, rows, which))
            lengths = [len(sequence) for sequence in chosen]
            self._note_read([0] * len(chosen), lengths, rows, which)
            order += indices
        if not order:
            return torch.empty(0, 0, device=self._device)
        return torch.cat(logits)[torch.tensor(order, device=self._device).argsort()]

    def _extend(
        self, slots: Sequence[int], sequences: Sequence[Sequence[int]], held: Sequence[int]
    ) -> torch.Tensor:
        """One forward pass over what `slots` don't hold yet; next-token logits [len(slots), V].

        m rows; T, the most new tokens; L, the longest sequence.
        """
        tails = [list(s[count:]) for s, count in zip(sequences, held, strict=True)]
        lengths = [len(tail) for tail in tails]
        most = max(lengths)
        self._cache.begin_extend(held, lengths, slots, self._device)
        padding = most - torch.tensor(lengths, device=self._device)
        index = torch.arange(most, device=self._device)
        first = torch.tensor(list(held), device=self._device) - padding
        positions = (first[:, None] + index[None]).clamp(min=0)  # [m, T]
        columns = torch.arange(max(map(len, sequences)), device=self._device)[None]  # [1, L]
        # Padding sees the first column, at least: a row of the mask without any True gives NaN.
        seen = columns[:, None] <= positions[:, :, None]  # [m, T, L]
        logits = self._pass(
            input_ids=torch.tensor(
                [[0] * (most - len(tail)) + tail for tail in tails], device=self._device
            ),
            position_ids=positions,
            attention_mask=self._attention.masks(
                seen, positions, columns.expand(len(slots), -1), self._dtype
            ),
            logits_to_keep=1,
        )
        self._note_read(held, lengths, slots, range(len(slots)))
        return logits

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

    def _note_read(
        self,
        starts: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
        which: Sequence[int],
    ) -> None:
        """The rows in `slots` get the routing of the left-padded pass just made.

        It read `lengths` tokens from `starts` on. Of those that were read before nothing is noted.
        """
        found = list(self._chosen(len(lengths)))
        if not found or self._routing is None:
            return
        size = self._routing.token_bytes
        for slot, index in zip(slots, which, strict=True):
            chosen = self._rows[slot].chosen
            read = found[index][-lengths[index] * size :]
            chosen += read[len(chosen) - starts[index] * size :]

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
        for slot in done:
            self._keep(slot)
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
            length = max(self._rows[target].length for target in targets)
            self._cache.move(sources, targets, min(length, self._cache.columns))
            self._sampler.move(sources, targets)
            self._last_tokens[targets] = self._last_tokens[sources]
            self._positions[targets] = self._positions[sources]
        del self._rows[count:]
