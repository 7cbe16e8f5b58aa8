"""The torch engine: continuous batching over KV slots, around an unmodified Transformers model.

A poll fills free slots from the queue and makes one forward pass, which feeds the newest token of
every live row and samples its next one. The context of a row that has nothing in the cache yet, all
tokens before the newest, is read in the same pass. Queued rows, or else the last live ones, take
the place of rows that finish, so that live rows stay `[0, n)` and attention is trimmed to the
longest of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from msgspec.structs import replace

from umbra.proto.errors import UsageError
from umbra.proto.records import Manifest, Routing, Sampling, Support
from umbra.services.generator.engines.engine import (
    EngineError,
    EngineOutput,
    EngineRequest,
    FinishReason,
    KvPolicy,
    check_request,
    joined,
    spans_of,
    support_limit,
)
from umbra.services.generator.engines.slots import SlotCache
from umbra.services.modeling.architectures import cache_argument
from umbra.services.modeling.attention import Attention
from umbra.services.modeling.attention_backends import Context, slot_mask
from umbra.services.modeling.experts import NO_ROUTERS, Routers, check_routing_fits
from umbra.services.modeling.row_sizes import reading_tokens
from umbra.services.modeling.weights import WeightTable
from umbra.services.weights.manifest import Part
from umbra.services.weights.verify import SlotGuard


class Sampler:
    """A sampler of one token per row, each row with settings of its own.

    Order as in Transformers: temperature, top-k, top-p, min-p. Temperature 0 takes the most likely
    token and reports its logprob under the plain softmax. n rows, V tokens.

    `head` is how many of the likeliest tokens to tell where nothing is cut off; 0 = none.
    """

    def __init__(self, device: torch.device, seed: int, head: int = 0) -> None:
        self._head = head
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._samplings: list[Sampling] = []  # of the last call's rows; what follows is of them
        self._limits: list[int] = []  # ids to tell at most
        self._settings = torch.empty(0, 4, device=device)
        self._some_greedy = self._some_restricted = False

    def sample(
        self, logits: torch.Tensor, samplings: list[Sampling]
    ) -> tuple[torch.Tensor, torch.Tensor, list[Support | None]]:
        """Return tokens [n], their logprobs [n] and supports, from `logits` [n, V]."""
        if samplings != self._samplings:
            self._samplings = samplings
            sampled = [s for s in samplings if s.temperature > 0]
            self._some_greedy = len(sampled) < len(samplings)
            self._some_restricted = any(s.cuts_off for s in sampled)
            self._limits = [support_limit(s, self._head) for s in samplings]
            values = [[s.temperature, float(s.top_k), s.top_p, s.min_p] for s in samplings]
            self._settings = torch.tensor(values, device=self._settings.device)
        logits = logits.float()
        temperature = self._settings[:, :1]
        greedy = temperature <= 0
        if self._some_greedy:
            temperature = torch.where(greedy, 1.0, temperature)
        scaled = logits / temperature
        if self._some_restricted:
            scaled = restrict(scaled, self._settings, greedy)
        logprobs = torch.log_softmax(scaled, dim=-1)
        tokens = self._draw(logprobs)
        if self._some_greedy:
            tokens = torch.where(greedy[:, 0], logits.argmax(dim=-1), tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0], self._supports(logprobs)

    def _supports(self, logprobs: torch.Tensor) -> list[Support | None]:
        """Return the tokens that `logprobs` [n, V] allow, for the rows that report them."""
        most = min(max(self._limits, default=0), logprobs.shape[1])
        if not most:
            return [None] * len(self._limits)
        values, ids = logprobs.topk(most)  # tokens that are left out have -inf
        sizes = map(min, self._limits, values.isfinite().sum(1).tolist())
        rows = zip(self._limits, sizes, ids.int().cpu().numpy(), values.cpu().numpy(), strict=True)
        return [
            Support(
                sizes=size.to_bytes(2, "little"),
                ids=allowed[:size].tobytes(),
                logprobs=likely[:size].tobytes() if self._head else None,
            )
            if limit
            else None
            for limit, size, allowed, likely in rows
        ]

    def _draw(self, logprobs: torch.Tensor) -> torch.Tensor:
        """Draw tokens [n] by inversion: one random number a row, where `multinomial` takes V.

        In double precision, so that unlikely tokens are not lost in the rounding of the sums.
        """
        sums = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
        uniform = torch.empty_like(sums[:, :1]).uniform_(generator=self._generator)
        # A hair below the whole, for a product that rounds up to it would be past the last token.
        tokens = torch.searchsorted(sums, uniform * (1 - 1e-15) * sums[:, -1:], right=True)[:, 0]
        return tokens.clamp_(max=logprobs.shape[1] - 1)  # past it where the logits are NaN


def restrict(logits: torch.Tensor, settings: torch.Tensor, greedy: torch.Tensor) -> torch.Tensor:
    """Restrict `logits` [n, V] to top-k, top-p and min-p, in this order; the rest becomes -inf.

    Args:
        logits: after temperature.
        settings: a row (temperature, top_k, top_p, min_p) for each, [n, 4]; the first is not read.
        greedy: rows that stay as they are, bool [n, 1].
    """
    vocabulary = logits.shape[1]
    top_k, top_p, min_p = settings[:, 1].long(), settings[:, 2], settings[:, 3]
    ordered, order = torch.sort(logits, dim=-1, descending=True)
    ranks = torch.arange(vocabulary, device=logits.device)[None]
    allowed = ranks < torch.where(top_k > 0, top_k, vocabulary)[:, None]
    probs = torch.softmax(ordered.masked_fill(~allowed, -torch.inf), dim=-1)
    # Keep a token while the mass before it is below top_p: the first one that reaches it stays.
    allowed &= (probs.cumsum(dim=-1) - probs < top_p[:, None]) | (top_p >= 1)[:, None]
    allowed &= probs >= min_p[:, None] * probs[:, :1]
    allowed |= greedy
    allowed[:, 0] = True
    allowed = torch.zeros_like(allowed).scatter(1, order, allowed)
    return logits.masked_fill(~allowed, -torch.inf)


@dataclass(slots=True)
class _Row:
    request: EngineRequest
    limit: int
    routing: Routing | None  # without its tokens' experts; None: it is not told
    unread: bool = True  # the cache has nothing of it that counts
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    starts: list[tuple[int, int]] = field(default_factory=list)  # versions, with first tokens
    chosen: bytearray = field(default_factory=bytearray)  # experts of all tokens that were read
    supports: list[Support] = field(default_factory=list)  # of its tokens, if they are told

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.tokens)[:-1]

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.tokens)

    def output(self, reason: FinishReason) -> EngineOutput:
        """Return the output of the request so far; it may go on."""
        return EngineOutput(
            self.request.request_id,
            self.tokens[:],
            self.logprobs[:],
            spans_of(self.starts, len(self.tokens)),
            reason,
            self.routing and replace(self.routing, chosen=bytes(self.chosen)),
            joined(self.supports),
        )


_Reading = tuple[tuple[int, ...], list[int]]  # a context, and the slots whose rows begin with it


class TorchEngine:
    """The `Engine` for CPUs, and for GPUs without vLLM. S slots, n live rows, V tokens.

    `weights` says where versions go, if that is not all of `model`. `tell_head`: as of `Sampler`.

    Raises UsageError: `tell_routing` of a model without routers, or too many of their choices.
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
        tell_head: int = 0,
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
        attention = Attention.prepare(model, torch.device("cpu"))
        self._windows = attention.windows
        self._states: Any = model.config if attention.recurrent else None  # its layers' kinds
        self._cache_argument = cache_argument(model)
        self._weights = weights or WeightTable(model)
        self._routers = Routers.of(model) if tell_routing else None
        self._routing: Routing | None = None
        if self._routers is not None:
            layers, choices, experts = self._routers.kind
            check_routing_fits(self._routers.kind, max_context)
            self._routing = Routing(layers=layers, choices=choices, experts=experts, chosen=b"")
        elif tell_routing:
            raise UsageError(NO_ROUTERS)
        self._reads = reading_tokens(self._device.type, sum(p.numel() for p in model.parameters()))
        self._cache = SlotCache(slots, max_context, self._states)
        self._sampler = Sampler(self._device, seed, tell_head)
        self._queue: deque[_Row] = deque()
        self._rows: list[_Row] = []  # the live ones, by slot
        self._longest = 0  # tokens of a row, when the last step began
        self._outputs: list[EngineOutput] = []

    @property
    def busy(self) -> bool:
        return bool(self._rows or self._queue or self._outputs)

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            limit = check_request(request, self.max_context, self._vocabulary)
            self._queue.append(_Row(request, limit, self._routing))

    @torch.inference_mode()
    def poll(self, timeout_s: float = 0.0) -> list[EngineOutput]:
        """Fill free slots, make one pass over all live rows, return the finished requests.

        Raises EngineError: torch failed, or the logits are not finite.
        """
        try:
            self._rows += self._admit(self.slots - len(self._rows))
            if self._rows:
                self._step()
        except RuntimeError as error:  # out of memory, a lost device, a kernel that failed
            first = str(error).partition("\n")[0]
            raise EngineError(
                f"the torch engine failed on {self._device} with {len(self._rows)} of {self.slots} "
                f"slots in use: {type(error).__name__}: {first}"
            ) from error
        outputs, self._outputs = self._outputs, []
        return outputs

    @torch.inference_mode()
    def load(
        self,
        manifest: Manifest,
        data: Part,
        version: int,
        kv_policy: KvPolicy,
        guard: SlotGuard | None = None,
    ) -> None:
        """Serve `version` from the next token on; see `Engine.load`."""
        self._weights.load(manifest, data)
        if guard is not None:
            guard.verify()
        self.version = version
        for row in self._rows:
            row.starts.append((version, len(row.tokens)))
            row.unread = row.unread or kv_policy == "recompute"

    @torch.inference_mode()
    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        rows = {row.request.request_id: row for row in (*self._rows, *self._queue)}
        names = rows.keys() if request_ids is None else rows.keys() & set(request_ids)
        self._queue = deque(row for row in self._queue if row.request.request_id not in names)
        live = [row.request.request_id for row in self._rows]
        self._close_holes([slot for slot, name in enumerate(live) if name in names])
        return [row.output("abort") for name, row in rows.items() if name in names]

    def new_tokens(self) -> Mapping[str, Sequence[int]]:
        return {row.request.request_id: row.tokens for row in self._rows}

    def peek(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        names = set(request_ids)
        return [row.output("abort") for row in self._rows if row.request.request_id in names]

    def forget(self, session: str) -> None:
        """Do nothing: no KV is kept of a session between its turns."""

    def close(self) -> None:
        self._rows.clear()
        self._queue.clear()
        self._cache = SlotCache(self.slots, self.max_context, self._states)

    def _admit(self, count: int) -> list[_Row]:
        """Return at most `count` requests of the queue that begin, no more than a pass reads."""
        rows: list[_Row] = []
        contexts = {row.context for row in (self._rows if count else ()) if row.unread}
        room = self._reads - sum(map(len, contexts))
        while self._queue and len(rows) < count:
            context = self._queue[0].context
            if context not in contexts:
                room -= len(context)
                if room < 0 and contexts:
                    break
                contexts.add(context)
            rows.append(self._queue.popleft())
            rows[-1].starts.append((self.version, 0))
        return rows

    def _step(self) -> None:
        lengths = [row.length for row in self._rows]
        self._longest = max(lengths)
        self._cache.reserve(len(self._rows), self._longest)
        fed = [(row.tokens or row.request.prompt_ids)[-1] for row in self._rows]
        fed += [length - 1 for length in lengths]
        newest = torch.tensor(fed, device=self._device).view(2, -1)
        readings = self._unread()
        self._cache.clear([slot for slot, row in enumerate(self._rows) if row.unread])
        # The longest by themselves, if they are too much for this pass; all, if there are states.
        sums = list(accumulate(len(tokens) for tokens, _ in readings))
        here = 0 if self._states is not None else bisect_right(sums, self._reads)
        for reading in readings[here:]:
            self._pass(newest[:, :0], [reading])
        logits = self._pass(newest, readings[:here])
        samplings = [row.request.sampling for row in self._rows]
        self._append(*self._sampler.sample(logits, samplings))

    def _unread(self) -> list[_Reading]:
        """Return the contexts to read, the shortest first; equal ones, as of a group, once."""
        shared: dict[tuple[int, ...], list[int]] = {}
        for slot, row in enumerate(self._rows):
            if row.unread:
                shared.setdefault(row.context, []).append(slot)
        shared.pop((), None)
        return sorted(shared.items(), key=lambda reading: len(reading[0]))

    def _pass(self, newest: torch.Tensor, readings: Sequence[_Reading]) -> torch.Tensor:
        """Feed `newest`, tokens and positions [2, n] of the first rows, and read `readings`.

        Return logits [n, V].
        """
        contexts = [Context(slots[0], len(tokens)) for tokens, slots in readings]
        count, positions, columns = newest.shape[1], newest[1], self._longest
        takers = [slots for _, slots in readings]
        self._cache.begin(positions, contexts, takers, view=(len(self._rows), columns))
        masks = {
            kind: slot_mask(positions, columns, contexts, window, self._dtype)
            for kind, window in self._windows
        }
        keep: int | torch.Tensor = 0  # all
        if contexts:
            tokens = [token for context, _ in readings for token in context]
            where = [at for context in contexts for at in range(context.length)]
            read = torch.tensor([tokens, where], device=self._device)
            newest = torch.cat((newest, read), 1)
            keep = torch.arange(count, device=self._device)
        inputs = newest[:, None]  # [2, 1, T]
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()), None)
        if self._states is not None and not contexts:
            inputs = newest[..., None]  # n sequences of one token
            mask = mask and mask.newest
        if self._routers is not None:
            self._routers.noted = []
        logits = self._model(
            input_ids=inputs[0],
            position_ids=inputs[1],
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_argument: self._cache},
        ).logits.flatten(0, 1)
        self._cache.end()
        self._note_routing(count, readings)
        return logits

    def _note_routing(self, count: int, readings: Sequence[_Reading]) -> None:
        """Add the experts that the last pass chose to each row, if routing is reported.

        Tokens that are read again keep the experts noted first.
        """
        if self._routers is None or self._routing is None:
            return
        choices = torch.stack(self._routers.noted or [], 1)  # [tokens, layers, choices]
        kind = torch.uint8 if self._routers.experts <= 256 else torch.int16
        data = choices.to(kind).cpu().numpy().tobytes()
        size = self._routing.token_bytes
        start = count * size
        for tokens, slots in readings:
            end = start + len(tokens) * size
            for slot in slots:
                if not self._rows[slot].tokens:
                    self._rows[slot].chosen += data[start:end]
            start = end
        for slot, row in enumerate(self._rows[:count]):
            row.chosen += data[slot * size : (slot + 1) * size]

    def _append(
        self, tokens: torch.Tensor, logprobs: torch.Tensor, supports: list[Support | None]
    ) -> None:
        finished: list[int] = []
        # One transfer, the only time in a step that a GPU is waited for; double holds both exactly.
        both = torch.stack((tokens.double(), logprobs.double())).tolist()
        if not math.isfinite(sum(both[1])):
            raise EngineError(
                f"the logits of version {self.version} are not finite: its weights are broken, or "
                "its numbers leave the range of their type"
            )
        sampled = zip(self._rows, *both, supports, strict=True)
        for slot, (row, number, logprob, support) in enumerate(sampled):
            token = int(number)
            row.unread = False
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if support is not None:
                row.supports.append(support)
            stopped = token in self._stop_ids
            if stopped or len(row.tokens) >= row.limit:
                self._outputs.append(row.output("stop" if stopped else "length"))
                finished.append(slot)
        self.decoded_tokens += len(self._rows)
        self._close_holes(finished)

    def _close_holes(self, holes: Sequence[int]) -> None:
        """Remove rows `holes` (ascending); queued and then the last live rows take their places."""
        admitted = self._admit(len(holes))
        for slot, row in zip(holes, admitted, strict=False):
            self._rows[slot] = row
        moved: dict[int, int] = {}  # targets, with their sources
        for hole in reversed(holes[len(admitted) :]):
            row, last = self._rows.pop(), len(self._rows)
            if hole < last:
                self._rows[hole] = row
                moved[hole] = moved.pop(last, last)
        if moved:
            length = max(self._rows[target].length for target in moved)
            self._cache.move([*moved.values()], [*moved], min(length, self._cache.columns))
