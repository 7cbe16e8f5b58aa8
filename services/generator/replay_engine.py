"""An engine without a model: made-up tokens of measured lengths, at a measured speed.

Everything around it is real, so a whole run can be tried at the scale of many GPUs without one.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from umbra.proto.records import Manifest, VersionSpan
from umbra.services.generator.engines.engine import (
    CacheFigures,
    EngineOutput,
    EngineRequest,
    FinishReason,
    KvPolicy,
    check_request,
)
from umbra.services.generator.replay_model import ReplayDecoder, ReplayModel
from umbra.services.weights.manifest import Part


@dataclass(frozen=True, slots=True)
class ReplayTokens:
    """The tokens that a replay engine knows."""

    vocabulary: int  # how many exist: every logprob is that of a uniform choice among them
    filler: int  # neither special nor one that ends a turn
    stop: int  # ends a turn


@dataclass(slots=True)
class _ReplayedRequest:
    """A request, and what is going to be said to it."""

    request: EngineRequest
    tokens: int
    reason: FinishReason
    spans: list[VersionSpan] = field(default_factory=list)


class ReplayEngine:
    """Says `tokens.filler` again and again, and `tokens.stop` at the end of a turn.

    How long a turn gets depends on the seed, the request and what precedes the turn, so it does
    not matter how often it is interrupted, and on which engine of a run it goes on.

    Args:
        model: speed and lengths.
        tokens: what it says.
        slots: sequences decoded at once.
        max_context: prompt plus new tokens at most.
        seed: of the lengths; the same for all engines of a run.
        clock: seconds.
        wait: lets so many seconds pass on that clock.
    """

    def __init__(
        self,
        model: ReplayModel,
        tokens: ReplayTokens,
        *,
        slots: int,
        max_context: int,
        seed: int = 0,
        version: int = -1,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.version = version
        self.slots = slots
        self.max_context = max_context
        self.decoded_tokens = 0
        self.cache = CacheFigures()
        self._model = model
        self._decoder = ReplayDecoder(model, slots)
        self._tokens = tokens
        self._seed = seed
        self._clock, self._wait = clock, wait
        self._replies: dict[str, _ReplayedRequest] = {}
        self._outputs: list[EngineOutput] = []

    @property
    def live(self) -> int:
        return self._decoder.live

    @property
    def free(self) -> int:
        """Slots that neither a live nor a queued request will take."""
        return max(0, self.slots - self._decoder.live - self._decoder.queued)

    @property
    def fits(self) -> int:
        """All of them: it has no cache."""
        return self.slots

    @property
    def busy(self) -> bool:
        return bool(self._replies or self._outputs)

    def next_at(self) -> float | None:
        """When something will finish on the clock if nothing happens until then: for simulators."""
        return self._decoder.next_at()

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        now = self._clock()
        for request in requests:
            limit = check_request(request, self.max_context, self._tokens.vocabulary)
            prompt, said = request.prompt_ids, 0
            while said < len(prompt) and prompt[-1 - said] == self._tokens.filler:
                said += 1  # by an engine like us, before the turn was interrupted
            turn = f"{self._seed}/{request.request_id}/{len(prompt) - said}"
            left = max(1, self._model.length(random.Random(turn).random()) - said)
            reason: FinishReason = "stop" if left <= limit else "length"
            reply = _ReplayedRequest(request, min(left, limit), reason)
            self._replies[request.request_id] = reply
            self._decoder.submit(request.request_id, len(prompt), reply.tokens, now)

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        """What has finished by now; waits up to `timeout_s` if that is nothing."""
        self._advance()
        if not self._outputs and timeout_s > 0 and (at := self._decoder.next_at()) is not None:
            self._wait(min(timeout_s, max(0.0, at - self._clock())))
            self._advance()
        outputs, self._outputs = self._outputs, []
        return outputs

    def load(
        self, manifest: Manifest, parts: Iterable[Part], version: int, kv_policy: KvPolicy
    ) -> list[EngineOutput]:
        """Pretend to: the bytes are forgotten, and nothing is decoded while they come."""
        del manifest
        self._advance()
        began = self._clock()
        for _ in parts:
            pass
        self._decoder.pause(self._clock() - began, began)
        self._advance()
        aborted: list[EngineOutput] = []
        if kv_policy == "abort":
            aborted = self.abort(self._decoder.names())
        for name in self._decoder.names():
            self._close_span(name)
        self.version = version
        self._decoder.pause(self._model.pause_s, self._clock())
        if kv_policy == "recompute":
            self._decoder.reread()
        self._wait(self._model.pause_s)
        return aborted

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        """End these requests (None: all) now; returns what there is of them."""
        self._advance()
        names = list(self._replies) if request_ids is None else list(request_ids)
        outputs: list[EngineOutput] = []
        for name in names:
            if name in self._replies:
                self._close_span(name)
                made = self._decoder.remove(name) or 0
                outputs.append(self._output(self._replies.pop(name), made, "abort"))
        return outputs

    def peek(self, at_least: Mapping[str, int]) -> list[EngineOutput]:
        """What there is of the live requests that have so many tokens; see `Engine.peek`."""
        outputs: list[EngineOutput] = []
        for name, least in at_least.items():
            made = self._decoder.made(name)
            if made >= max(1, least):
                self._close_span(name)
                outputs.append(self._output(self._replies[name], made, "abort"))
        return outputs

    def forget(self, session: str) -> None:
        """It remembers nothing."""

    def close(self) -> None:
        self.abort()

    def _advance(self) -> None:
        for name in self._decoder.advance(self._clock()):
            reply = self._replies.pop(name)
            self._extend(reply, reply.tokens)
            self._outputs.append(self._output(reply, reply.tokens, reply.reason))
        self.decoded_tokens = self._decoder.tokens

    def _close_span(self, name: str) -> None:
        self._extend(self._replies[name], self._decoder.made(name))

    def _extend(self, reply: _ReplayedRequest, made: int) -> None:
        """The tokens up to `made` are of the version that is served."""
        start = reply.spans[-1].end if reply.spans else 0
        if made > start:
            if reply.spans and reply.spans[-1].version == self.version:
                start = reply.spans.pop().start
            reply.spans.append(VersionSpan(version=self.version, start=start, end=made))

    def _output(self, reply: _ReplayedRequest, made: int, reason: FinishReason) -> EngineOutput:
        tokens = [self._tokens.filler] * made
        if reason == "stop":
            tokens[-1] = self._tokens.stop
        logprobs = [-math.log(self._tokens.vocabulary)] * made
        return EngineOutput(reply.request.request_id, tokens, logprobs, reply.spans[:], reason)
