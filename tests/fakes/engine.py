"""An engine without a model, for tests of what drives one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from umbra.proto.records import Manifest
from umbra.services.generator.engines.engine import (
    EngineOutput,
    EngineRequest,
    KvPolicy,
    spans_of,
)
from umbra.services.weights.manifest import Part
from umbra.services.weights.verify import SlotGuard


@dataclass
class ScriptedEngine:
    """Says what `script(prompt_ids)` returns: one token of every live request per poll.

    A token in `stop_ids` ends a request, as does `max_tokens`.
    """

    script: Callable[[Sequence[int]], list[int]]
    stop_ids: frozenset[int] = frozenset({3})
    version: int = 0
    slots: int = 4
    max_context: int = 256
    decoded_tokens: int = 0
    loads: list[tuple[int, str]] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    _live: dict[str, tuple[EngineRequest, list[int], list[int]]] = field(default_factory=dict)

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def busy(self) -> bool:
        return bool(self._live)

    def submit(self, requests: Iterable[EngineRequest]) -> None:
        for request in requests:
            self.requests.append(request)
            self._live[request.request_id] = (request, [], [])

    def poll(self, timeout_s: float) -> list[EngineOutput]:
        del timeout_s
        done: list[EngineOutput] = []
        for name, (request, tokens, versions) in list(self._live.items())[: self.slots]:
            tokens.append(self.script([*request.prompt_ids, *tokens])[0])
            versions.append(self.version)
            self.decoded_tokens += 1
            if tokens[-1] in self.stop_ids or len(tokens) == request.max_tokens:
                del self._live[name]
                reason = "stop" if tokens[-1] in self.stop_ids else "length"
                done.append(output(name, tokens, versions, reason))
        return done

    def load(
        self,
        manifest: Manifest,
        data: Part,
        version: int,
        kv_policy: KvPolicy,
        guard: SlotGuard | None = None,
    ) -> None:
        self.loads.append((version, kv_policy))
        self.version = version

    def abort(self, request_ids: Iterable[str] | None = None) -> list[EngineOutput]:
        names = list(self._live) if request_ids is None else list(request_ids)
        gone = [(n, self._live.pop(n)) for n in names if n in self._live]
        return [output(n, tokens, versions, "abort") for n, (_, tokens, versions) in gone]

    def new_tokens(self) -> dict[str, list[int]]:
        return {name: tokens for name, (_, tokens, _) in self._live.items()}

    def peek(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        names = set(request_ids)
        return [
            output(n, t, versions, "abort")
            for n, (_, t, versions) in self._live.items()
            if n in names
        ]

    def forget(self, session: str) -> None:
        self.forgotten.append(session)

    def close(self) -> None:
        self._live.clear()


def output(name: str, tokens: list[int], versions: list[int], reason: Any) -> EngineOutput:
    """An output whose token number i has logprob -i."""
    starts = [(v, i) for i, v in enumerate(versions) if i == 0 or versions[i - 1] != v]
    logprobs = [-float(i) for i in range(len(tokens))]
    return EngineOutput(name, list(tokens), logprobs, spans_of(starts, len(tokens)), reason)
