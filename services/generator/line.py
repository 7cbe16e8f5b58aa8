"""A line of tokens: a prompt and its response, with mask, logprobs and routing."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from umbra.proto.records import (
    Routing,
    Sampling,
    Support,
    Trajectory,
    VersionSpan,
    pack_float32,
    pack_int32,
    unpack_float32,
    unpack_int32,
)
from umbra.services.config.trajectory_rules import RunFacts, find_fault
from umbra.services.environments.protocol import Opening
from umbra.services.generator.engines.engine import EngineOutput, joined


@dataclass(eq=False)
class Line:
    """A prompt, and the model's turns with what came between them; it only ever grows.

    Its response has one entry per token in each list.
    """

    opening: Opening = Opening([])  # noqa: RUF009 - it is frozen
    prompt: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    mask: bytearray = field(default_factory=bytearray)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    routing: Routing | None = None  # of the prompt's tokens, and of the response's but the last
    supports: list[Support | None] = field(default_factory=list)  # in parts, from first to last
    turn_start: int = 0  # where the current model turn begins
    shared: int = 0  # response tokens that it has from another line
    number: int = 0  # of its prompt: lines with the same one have the same

    @property
    def spoken(self) -> bool:
        """True if it has a token of the model that no earlier branch has."""
        return 1 in self.mask[self.shared :]

    @property
    def support(self) -> Support | None:
        return joined(self.supports)

    def add_model(self, output: EngineOutput) -> None:
        offset = len(self.ids)
        if output.token_ids:
            self.supports.append(output.support)
        self.ids += output.token_ids
        self.mask += b"\x01" * len(output.token_ids)
        self.logprobs += output.logprobs
        for span in output.spans:
            self._add_span(span.version, offset + span.end)
        self._add_routing(output.routing)

    def add_environment(self, ids: list[int]) -> None:
        self.supports.append(Support(sizes=bytes(2 * len(ids)), ids=b""))
        # They were sampled by nobody: counted to the span before them, they change no staleness.
        self.ids += ids
        self.mask += bytes(len(ids))
        self.logprobs += [0.0] * len(ids)
        self._add_span(self.spans[-1].version, len(self.ids))

    def _add_span(self, version: int, end: int) -> None:
        start = self.spans[-1].end if self.spans else 0
        if end == start:
            return
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=version, start=start, end=end))

    def _add_routing(self, routing: Routing | None) -> None:
        """Take over the routing of tokens whose routing is unknown so far.

        The engine has read all tokens before its own again, perhaps with other weights: those were
        followed by what an earlier pass predicted, so the routing of that pass stays theirs.
        """
        known = self.routing
        if known is not None and routing is not None and _kind(known) == _kind(routing):
            routing = replace(known, chosen=known.chosen + routing.chosen[len(known.chosen) :])
        self.routing = routing

    def copy(self) -> Line:
        lists = self.ids[:], self.mask[:], self.logprobs[:], self.spans[:]
        return Line(self.opening, self.prompt, *lists, self.routing, self.supports[:])

    def until(self, end: int) -> Line:
        """Return a line that branches off after `end` response tokens, at the end of a turn."""
        lists = self.ids[:end], self.mask[:end], self.logprobs[:end], _spans(self.spans, end)
        supports = [self.support and self.support.part(0, end)]
        known = self.opening, self.prompt, *lists, None, supports
        return Line(*known, turn_start=end, shared=end, number=self.number)

    def turn_ends(self) -> list[int]:
        """Return where model turn, environment turn, model turn, ... end, in order."""
        runs = (len(list(run)) for _, run in itertools.groupby(self.mask))
        return list(itertools.accumulate(runs))

    def packed(self, trained: bool) -> dict[str, Any]:
        """Return the fields that a `Trajectory` or `Branch` has of it."""
        return {
            "prompt_ids": pack_int32(self.prompt),
            "response_ids": pack_int32(self.ids),
            "loss_mask": bytes(self.mask),
            "logprobs": pack_float32(self.logprobs),
            "spans": list(self.spans),
            "support": self.support if trained else None,
        }


def shortened(output: EngineOutput, count: int, before: int) -> EngineOutput:
    """Return `output` with its first `count` tokens only; `before` tokens precede it."""
    routing = output.routing
    if routing is not None:
        size = (before + count - 1) * routing.token_bytes
        routing = replace(routing, chosen=routing.chosen[:size])
    return dataclasses.replace(
        output,
        token_ids=output.token_ids[:count],
        logprobs=output.logprobs[:count],
        spans=_spans(output.spans, count),
        routing=routing,
        support=output.support and output.support.part(0, count),
    )


def _spans(spans: list[VersionSpan], count: int) -> list[VersionSpan]:
    return [replace(span, end=min(span.end, count)) for span in spans if span.start < count]


def _kind(routing: Routing) -> tuple[int, int, int]:
    return routing.layers, routing.choices, routing.experts


def line_of(partial: Trajectory, sampling: Sampling) -> Line | None:
    """Return the line of a partial; None if it can't be continued.

    One that can is sound, one line, begins with a model's token, and was drawn as `sampling` says.
    """
    if (
        partial.branches
        or partial.sampling.distribution != sampling.distribution
        or find_fault(partial, RunFacts(), trained=False)
        or partial.loss_mask[0] != 1
    ):
        return None
    return Line(
        prompt=unpack_int32(partial.prompt_ids),
        ids=unpack_int32(partial.response_ids),
        mask=bytearray(partial.loss_mask),
        logprobs=unpack_float32(partial.logprobs),
        spans=list(partial.spans),
        routing=partial.routing,
        supports=[partial.support],
    )
