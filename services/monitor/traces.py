"""The life of each traced group as one trace: rows of kind "life" and "push" in, spans out.

    group -> sample -> queued | generating -> turn, environment | scoring ... | ready | training
          -> push: for each receiver, the first version that was trained on the group

Ids follow from the names, so that spans of one trace may be made by several processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace

from umbra.proto.bounds import Name, Number

HELD = 4_096  # trained groups that wait for their pushes; the oldest go
WITHIN_LEASE = ("turn", "environment")


class LifeRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage that is over; times are seconds since the epoch."""

    group: Name
    stage: Name
    start: Number
    end: Number
    sample: Name = ""
    attempt: int = 0
    outcome: Name = ""
    step: int = 0  # in which it was trained on
    prompt: Name = ""
    tokens: int = 0
    reward: Number = 0.0
    oldest: int = -1
    newest: int = -1


class LifeSpan(msgspec.Struct, frozen=True):
    """A span of OpenTelemetry; `parent` is 0 for a root."""

    trace: int
    id: int
    parent: int
    name: str
    service: str
    start: float
    end: float
    attributes: dict[str, str | int | float]


@dataclass(slots=True)
class _Trained:
    """A group that was trained on, until all receivers have weights that know of it."""

    root: LifeSpan
    step: int
    receivers: set[str] = field(default_factory=set[str])


class LifeSpans:
    """Makes spans of rows, which come in about the order of their ends.

    Args:
        run_id: of the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._trained: OrderedDict[str, _Trained] = OrderedDict()

    def lived(self, service: str, row: LifeRow) -> list[LifeSpan]:
        """What a row of `service` makes known."""
        group, sample = self._id(row.group), self._id(row.sample)
        lease = self._id(row.sample, "generating", str(row.attempt))
        match row.stage:
            case "group":
                span = self._span(service, row, group, 0)
                if not row.step:
                    return [span]
                self._trained[row.group] = _Trained(span, row.step)
                over = len(self._trained) - HELD
                return [self._trained.popitem(last=False)[1].root for _ in range(over)]
            case "sample":
                return [self._span(service, row, sample, group)]
            case "generating":
                return [self._span(service, row, lease, sample)]
            case _:
                own = self._id(row.sample, row.stage, repr(row.start))
                return [self._span(service, row, own, lease if _in_lease(row) else sample)]

    def pushed(
        self, service: str, version: int, receiver: str, start: float, end: float
    ) -> list[LifeSpan]:
        """`receiver` serves `version`, which came from `start` to `end`."""
        spans: list[LifeSpan] = []
        for name, trained in list(self._trained.items()):
            if trained.step > version:
                continue
            root = trained.root
            if receiver in trained.receivers:  # all have had their turn
                spans.append(self._trained.pop(name).root)
                continue
            trained.receivers.add(receiver)
            told: dict[str, str | int | float] = {
                "umbra.version": version,
                "umbra.receiver": receiver,
            }
            own = self._id(name, "push", receiver)
            spans.append(LifeSpan(root.trace, own, root.id, "push", service, start, end, told))
            trained.root = replace(root, start=min(root.start, start), end=max(root.end, end))
        return spans

    def rest(self) -> list[LifeSpan]:
        """What waits for pushes that will not come."""
        spans = [trained.root for trained in self._trained.values()]
        self._trained.clear()
        return spans

    def _span(self, service: str, row: LifeRow, own: int, parent: int) -> LifeSpan:
        trace = xxhash.xxh3_128_intdigest(f"{self._run_id}/{row.group}".encode()) or 1
        facts = msgspec.to_builtins(row)
        told = {f"umbra.{k}": v for k, v in facts.items() if k not in ("stage", "start", "end")}
        return LifeSpan(trace, own, parent, row.stage, service, row.start, row.end, told)

    def _id(self, *names: str) -> int:
        return xxhash.xxh3_64_intdigest("/".join((self._run_id, *names)).encode()) or 1


def _in_lease(row: LifeRow) -> bool:
    return row.stage in WITHIN_LEASE


def otlp_json(run_id: str, spans: Iterable[LifeSpan]) -> dict[str, Any]:
    """A request of OTLP over HTTP in its JSON form (opentelemetry-proto)."""
    services: dict[str, list[dict[str, Any]]] = {}
    for span in spans:
        services.setdefault(span.service, []).append(
            {
                "traceId": f"{span.trace:032x}",
                "spanId": f"{span.id:016x}",
                **({"parentSpanId": f"{span.parent:016x}"} if span.parent else {}),
                "name": span.name,
                "kind": 1,
                "startTimeUnixNano": str(nanoseconds(span.start)),
                "endTimeUnixNano": str(nanoseconds(span.end)),
                "attributes": _attributes(span.attributes),
            }
        )
    return {
        "resourceSpans": [
            {
                "resource": {
                    "attributes": _attributes(
                        {"service.name": service, "service.namespace": run_id}
                    )
                },
                "scopeSpans": [{"scope": {"name": "umbra"}, "spans": made}],
            }
            for service, made in services.items()
        ]
    }


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: str | float) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}
