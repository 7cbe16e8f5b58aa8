"""The life of a group, from its issue to the weights that know of it: rows, spans, and OTLP."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from fakes.broker_world import World, give_back, trajectory, world
from fakes.looks import PUSH, header, status
from msgspec.structs import replace

from umbra.deploy.report.command import write_report
from umbra.deploy.run_folder import RunFolder
from umbra.proto.messages import (
    Event,
    LeaseScoring,
    ReturnedSample,
    ScoringLeases,
    SubmitAck,
    SubmitScores,
)
from umbra.proto.records import SampleTask, Score
from umbra.services.generator.rollout import Phase
from umbra.services.generator.turn_log import TurnLog
from umbra.services.monitor import feed as feeds
from umbra.services.monitor.feed import Feed
from umbra.services.monitor.traces import LifeRow, LifeSpan, LifeSpans, otlp_json
from umbra.services.monitor.watch import Look
from umbra.services.process.lives import is_traced
from umbra.services.process.metrics import MetricsFile

Stage = tuple[str, float, float]


def stages(made: World) -> dict[str, list[Stage]]:
    """What became of each sample, and of each group."""
    found: dict[str, list[Stage]] = defaultdict(list)
    for row in made.lives:
        name = row.fields["sample"] or row.fields["group"]
        found[name].append((row.fields["stage"], row.start, row.end))
    return dict(found)


def trained_once(made: World) -> None:
    """Leased at 1 s, answered at 3 s, the batch formed at 4 s and committed at 6 s."""
    made.pass_time(1.0)
    tasks = made.lease("a", 4, 0)
    made.pass_time(2.0)
    assert not made.submit("a", *(trajectory(task, 0) for task in tasks)).refused
    made.pass_time(1.0)
    made.batch(1)
    made.pass_time(2.0)
    made.commit(1)


# -- the buffer's rows -----------------------------------------------------------------------------


def test_a_trained_group_has_a_row_for_each_stage() -> None:
    made = world(traced_share=1.0)
    trained_once(made)
    found = stages(made)
    assert found["s-0"] == [
        ("queued", 1.0, 1.0),
        ("generating", 1.0, 3.0),
        ("ready", 3.0, 4.0),
        ("training", 4.0, 6.0),
        ("sample", 1.0, 6.0),
    ]
    assert found["g-0"] == [("group", 1.0, 6.0)]
    (group,) = (row for row in made.lives if row.fields["sample"] == "" and row.end == 6.0
                and row.fields["group"] == "g-0")  # fmt: skip
    assert (group.fields["outcome"], group.fields["step"]) == ("trained", 1)
    sample = next(row for row in made.lives if row.fields["stage"] == "sample")
    assert sample.fields["outcome"] == "trained"
    assert sample.fields["tokens"] > 0


def test_a_sample_that_comes_back_is_queued_again() -> None:
    made = world(traced_share=1.0)
    tasks = made.lease("a", 2, 0)
    made.pass_time(1.0)
    first = ReturnedSample(sample_id=tasks[0].sample_id, attempt=1, reason="drained")
    give_back(made, "a", first)
    made.pass_time(1.0)
    made.lease("b", 1, 0)
    made.pass_time(1.0)
    give_back(made, "b", ReturnedSample(
        sample_id=tasks[0].sample_id, attempt=2, reason="the reward raised", failed=True,
    ))  # fmt: skip
    found = stages(made)
    assert found[tasks[0].sample_id] == [
        ("queued", 0.0, 0.0), ("generating", 0.0, 1.0), ("queued", 1.0, 2.0),
        ("generating", 2.0, 3.0), ("sample", 0.0, 3.0),
    ]  # fmt: skip
    assert found["g-0"] == [("group", 0.0, 3.0)]
    leases = [row.fields for row in made.lives if row.fields["stage"] == "generating"]
    assert [one["attempt"] for one in leases if one["sample"] == tasks[0].sample_id] == [1, 2]
    (group,) = (row.fields for row in made.lives if row.fields["stage"] == "group")
    assert (group["outcome"], group["step"]) == ("failed", 0)


def test_each_scoring_stage_is_one() -> None:
    made = world(traced_share=1.0, stages=["reward", "ref_logp"], group_size=1, batch_groups=1)
    made.join("scorer", "r")
    (task,) = made.lease("a", 1, 0)
    answer = trajectory(task, 0)
    assert not made.submit("a", answer).refused
    for stage in ("reward", "ref_logp"):
        made.pass_time(1.0)
        ask = LeaseScoring(stage=stage, capacity=1, wait_s=0)
        (work,) = made.get("r", ask, ScoringLeases).tasks
        made.pass_time(1.0)
        score = Score(sample_id=work.sample_id, attempt=work.attempt)
        if stage == "ref_logp":
            score = replace(score, logprobs=answer.logprobs)
        assert not made.get("r", SubmitScores(stage=stage, scores=[score]), SubmitAck).refused
    made.batch(1)
    made.commit(1)
    assert stages(made)[task.sample_id][2:] == [
        ("scoring reward", 0.0, 2.0), ("scoring ref_logp", 2.0, 4.0), ("ready", 4.0, 4.0),
        ("training", 4.0, 4.0), ("sample", 0.0, 4.0),
    ]  # fmt: skip


def test_after_a_restart_of_the_buffer_a_life_begins_with_it() -> None:
    made = world(traced_share=1.0, durable=True)
    made.produce("a", 0, 4)
    made.lives.clear()
    made.pass_time(10.0)
    made.restart_broker()
    made.join("trainer", "trainer", "trainer-2")
    made.batch(1)
    made.pass_time(1.0)
    made.commit(1)
    found = stages(made)
    assert found["s-0"] == [
        ("queued", 10.0, 10.0), ("ready", 10.0, 10.0), ("training", 10.0, 11.0),
        ("sample", 10.0, 11.0),
    ]  # fmt: skip


def test_a_share_of_the_groups_is_traced_and_none_unless_asked() -> None:
    made = world()
    trained_once(made)
    assert made.lives == []
    names = [f"g-{number}" for number in range(2_000)]
    chosen = {name for name in names if is_traced(name, 0.25)}
    assert 400 < len(chosen) < 600
    assert chosen < {name for name in names if is_traced(name, 0.5)}
    assert not any(is_traced(name, 0.0) for name in names)
    assert all(is_traced(name, 1.0) for name in names)


# -- the generators' rows --------------------------------------------------------------------------


def test_turns_and_environment_take_turns() -> None:
    now = 0.0
    rows: list[dict[str, Any]] = []
    metrics = MetricsFile(None, "generator-0")
    metrics.on_row = lambda kind, fields: rows.append({"kind": kind, **fields})
    log = TurnLog(metrics, 1.0, lambda: now)
    task = SampleTask(
        sample_id="s-0", group_id="g-0", prompt_id="p", attempt=2, row={}, lease_s=1.0
    )
    for phase in (Phase.RESET, Phase.GENERATE, Phase.STEP, Phase.GENERATE, Phase.DONE):
        log.advanced(task, phase)
        now += 1.0
    log.gone(task)
    assert [(r["stage"], r["start"], r["end"]) for r in rows] == [
        ("environment", 0.0, 1.0), ("turn", 1.0, 2.0), ("environment", 2.0, 3.0),
        ("turn", 3.0, 4.0),
    ]  # fmt: skip
    assert (
        rows[0].items() >= {"kind": "life", "group": "g-0", "sample": "s-0", "attempt": 2}.items()
    )
    rows.clear()
    for other, share in ((replace(task, pinned_version=3), 1.0), (task, 0.0)):
        untraced = TurnLog(metrics, share, lambda: now)
        untraced.advanced(other, Phase.RESET)
        untraced.gone(other)
    assert rows == []


# -- spans -----------------------------------------------------------------------------------------


def spans_of(made: World, *pushes: tuple[int, str, float]) -> list[LifeSpan]:
    """Of what the buffer told, then of pushes: version, receiver, and when they ended."""
    life = LifeSpans("run-1")
    found: list[LifeSpan] = []
    for row in made.lives:
        found += life.lived("buffer", LifeRow(start=row.start, end=row.end, **row.fields))
    for version, receiver, end in pushes:
        found += life.pushed("weight-hub", version, receiver, end - 0.5, end)
    return [*found, *life.rest()]


def check_nested(spans: list[LifeSpan], slack_s: float = 0.0) -> None:
    """Each trace has one root, and each span is within its parent."""
    by_id = {span.id: span for span in spans}
    assert len(by_id) == len(spans)
    roots = [span for span in spans if not span.parent]
    assert len({span.trace for span in spans}) == len(roots)
    for span in spans:
        assert span.start <= span.end
        if span.parent:
            parent = by_id[span.parent]
            assert parent.trace == span.trace
            assert parent.start - slack_s <= span.start, (span, parent)
            assert span.end <= parent.end + slack_s, (span, parent)


def test_spans_nest_and_the_group_lasts_until_its_weights_are_everywhere() -> None:
    made = world(traced_share=1.0)
    trained_once(made)
    # Version 1 is overtaken on the way to b; the second push to a ends the wait.
    spans = spans_of(made, (1, "a", 7.0), (2, "b", 8.0), (2, "a", 9.0), (3, "b", 10.0))
    check_nested(spans)
    own = [span for span in spans if span.attributes.get("umbra.group") == "g-0" or
           span.name == "push"]  # fmt: skip
    (root,) = (span for span in own if span.name == "group")
    assert (root.start, root.end) == (1.0, 8.0)
    pushes = {
        span.attributes["umbra.receiver"]: span.attributes["umbra.version"]
        for span in spans
        if span.name == "push" and span.parent == root.id
    }
    assert pushes == {"a": 1, "b": 2}


def test_a_group_without_pushes_is_told_in_the_end() -> None:
    made = world(traced_share=1.0)
    trained_once(made)
    names = [span.name for span in spans_of(made)]
    assert names.count("group") == 2
    assert "push" not in names


def test_what_a_generator_tells_is_within_its_lease() -> None:
    life = LifeSpans("run-1")
    row = LifeRow(group="g-0", sample="s-0", stage="generating", attempt=2, start=1.0, end=3.0)
    (lease,) = life.lived("buffer", row)
    (turn,) = life.lived("generator-0", replace(row, stage="turn", start=1.5, end=2.0))
    assert (turn.trace, turn.parent, turn.service) == (lease.trace, lease.id, "generator-0")
    (other,) = LifeSpans("run-2").lived("buffer", row)
    assert other.trace != lease.trace


# -- OTLP ------------------------------------------------------------------------------------------


def test_the_json_form_is_that_of_the_protocol() -> None:
    """Read by OpenTelemetry's own definition, whose JSON has ids in hexadecimal."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    from google.protobuf import json_format

    made = world(traced_share=1.0)
    trained_once(made)
    spans = spans_of(made)
    tree = json.loads(json.dumps(otlp_json("run-1", spans)))
    read = tree["resourceSpans"][0]["scopeSpans"][0]["spans"]
    for span in read:
        for key in ("traceId", "spanId", "parentSpanId"):
            if key in span:  # protobuf's own JSON has them in base64
                span[key] = base64.b64encode(bytes.fromhex(span[key])).decode()
    request = json_format.ParseDict(tree, service.ExportTraceServiceRequest())
    (resource,) = request.resource_spans
    told = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert told == {"service.name": "buffer", "service.namespace": "run-1"}
    first, theirs = spans[0], resource.scope_spans[0].spans[0]
    assert int.from_bytes(theirs.trace_id, "big") == first.trace
    assert int.from_bytes(theirs.span_id, "big") == first.id
    assert theirs.start_time_unix_nano == first.start * 1e9


def test_the_report_writes_the_lives_by_one_clock(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    life = {"kind": "life", "group": "g-0", "sample": "s-0", "attempt": 1}
    rows = [
        {"service": "generator-0", "kind": "clock", "time": 105.0, "offset_s": -5.0, "error_s": 0},
        {"service": "generator-0", "time": 108.0, **life, "stage": "turn", "start": 106.0,
         "end": 107.0},
        {"service": "buffer", "time": 103.0, **life, "stage": "generating", "start": 100.0,
         "end": 103.0},
        {"service": "buffer", "time": 105.0, **life, "stage": "group", "sample": "", "step": 1,
         "start": 100.0, "end": 105.0},
        {"service": "weight-hub", "time": 106.0, "kind": "push", **(PUSH | {"version": 1})},
    ]  # fmt: skip
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    written = write_report(folder)
    assert [path.name for path in written] == ["report.html", "trace.json", "lives.jsonl"]
    (line,) = written[-1].read_text(encoding="utf-8").splitlines()
    found = {
        span["name"]: (int(span["startTimeUnixNano"]) / 1e9, int(span["endTimeUnixNano"]) / 1e9)
        for resource in json.loads(line)["resourceSpans"]
        for span in resource["scopeSpans"][0]["spans"]
    }
    assert found == {
        "turn": (101.0, 102.0), "generating": (100.0, 103.0), "push": (105.98, 106.0),
        "group": (100.0, 106.0),
    }  # fmt: skip
    folder.metrics.write_text(json.dumps(rows[0]) + "\n", encoding="utf-8")
    assert len(write_report(folder)) == 2


# -- sending ---------------------------------------------------------------------------------------


def life_event(number: int) -> Event:
    fields = {"group": f"g-{number}", "stage": "group", "start": 1.0, "end": 2.0}
    return Event(kind="life", fields=fields)


def test_what_nobody_takes_is_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "LIVES_KEPT", 3)
    feed = Feed()
    for number in range(5):
        feed.heard(header("buffer"), life_event(number))
    feed.heard(header("buffer"), Event(kind="life", fields={"stage": 3}))
    assert (feed.lives_lost, feed.bad) == (2, 1)
    assert [getattr(seen.row, "group", "") for seen in feed.take_lives()] == ["g-2", "g-3", "g-4"]
    assert feed.take_lives() == []


def test_spans_that_the_receiver_does_not_take_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from umbra.services.monitor.telemetry import Telemetry

    class Down(SpanExporter):
        def export(self, spans: object) -> SpanExportResult:
            return SpanExportResult.FAILURE

    feed = Feed()
    for number in range(7):
        feed.heard(header("buffer"), life_event(number))
    telemetry = Telemetry("run-1", Down(), InMemoryMetricReader())
    telemetry.show(Look(status(), lives=feed.take_lives(), lives_lost=2))
    telemetry.close()
    assert telemetry.dropped == 9
    assert "9 of 9 spans did not reach" in caplog.text
