"""A run whose groups are traced, watched by a real receiver of OTLP over HTTP; and by none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fakes.slowness import seconds
from test_up import UMBRA, UpProcess, up  # noqa: F401 - a fixture

from umbra import cli

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

WAIT_S = seconds(60.0)
OWN = ("group", "sample", "queued", "generating", "scoring reward", "ready", "training")
STAGES = {*OWN, "turn", "environment", "push"}

Span = dict[str, Any]  # id, parent, name, service, start and end in seconds


class Collector(ThreadingHTTPServer):
    """Keeps the spans that are posted to /v1/traces, by trace."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Posted)
        self.traces: dict[str, list[Span]] = defaultdict(list)
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def copy(self) -> dict[str, list[Span]]:
        with self.lock:
            return {trace: list(spans) for trace, spans in self.traces.items()}

    def close(self) -> None:
        self.shutdown()
        self._thread.join(WAIT_S)
        self.server_close()


class Posted(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/traces":
            assert isinstance(self.server, Collector)
            request = trace_service.ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                named = {one.key: one.value.string_value for one in resource.resource.attributes}
                for span in resource.scope_spans[0].spans:
                    made = {
                        "id": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "name": span.name,
                        "service": named["service.name"],
                        "start": span.start_time_unix_nano / 1e9,
                        "end": span.end_time_unix_nano / 1e9,
                    }
                    with self.server.lock:
                        self.server.traces[span.trace_id.hex()].append(made)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with closing(Collector()) as collector:
        yield collector


def of_file(path: Path) -> dict[str, list[Span]]:
    """The traces in lines of OTLP."""
    traces: dict[str, list[Span]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            named = {
                one["key"]: one["value"]["stringValue"]
                for one in resource["resource"]["attributes"]
            }
            for span in resource["scopeSpans"][0]["spans"]:
                traces[span["traceId"]].append(
                    {
                        "id": span["spanId"],
                        "parent": span.get("parentSpanId", ""),
                        "name": span["name"],
                        "service": named["service.name"],
                        "start": int(span["startTimeUnixNano"]) / 1e9,
                        "end": int(span["endTimeUnixNano"]) / 1e9,
                    }
                )
    return traces


def complete(traces: dict[str, list[Span]]) -> list[list[Span]]:
    """The traces that have all stages."""
    return [spans for spans in traces.values() if {span["name"] for span in spans} >= STAGES]


def check_nested(spans: list[Span], slack_s: float) -> None:
    """Times are within those of the parent; those of other processes than the buffer to within
    `slack_s`, which is how well their clocks are known."""
    by_id = {span["id"]: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = (span for span in spans if not span["parent"])
    assert root["name"] == "group"
    for span in spans:
        assert span["start"] <= span["end"]
        if span["parent"]:
            parent = by_id[span["parent"]]
            slack = 0.001 if span["name"] in OWN else slack_s
            assert parent["start"] - slack <= span["start"], (span, parent)
            assert span["end"] <= parent["end"] + slack, (span, parent)


def batches(process: UpProcess) -> list[int]:
    """Groups of each batch so far."""
    return [row["groups"] for row in process.rows() if row["kind"] == "batch"]


@contextmanager
def watching(broker: str, url: str) -> Iterator[subprocess.Popen[str]]:
    """A monitor that sends to `url`."""
    monitor = subprocess.Popen(
        [*UMBRA, "monitor", "--broker", broker, "--otlp", url, "--interval", "0.2"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield monitor
    finally:
        monitor.kill()
        monitor.communicate()


def ended(monitor: subprocess.Popen[str]) -> str:
    """What it said, once it has ended after Ctrl-C."""
    monitor.send_signal(signal.SIGINT)
    _, said = monitor.communicate(timeout=WAIT_S)
    assert monitor.returncode == 0
    return said


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_traces_of_a_run_cover_all_stages(
    up: Callable[..., UpProcess],  # noqa: F811
    collector: Collector,
) -> None:
    """1. A run begins, all of its groups traced. 2. A monitor attaches, and sends what it hears,
    until there is a whole life. 3. The run is ended, then the monitor. Result: times nest, live and
    in the file that the run leaves."""
    process = up(
        "run.steps=100000",
        "log.traced_share=1.0",
        'buffer.stages=["reward"]',
        "scorer.reward=1",
    )
    with watching(process.broker(), collector.url) as monitor:
        process.until(lambda: complete(collector.copy()), "a whole life")
        process.until(lambda: len(batches(process)) > 3, "batches before the last three")
        process.popen.send_signal(signal.SIGINT)
        assert process.finish()["exit_reason"] == "interrupted", process.lines
        said = ended(monitor)
    assert "did not reach" not in said
    slack_s = 0.001 + 2 * max(
        (row["error_s"] for row in process.rows() if row["kind"] == "clock"), default=0.0
    )
    written = complete(of_file(process.run_dir / "lives.jsonl"))
    for spans in (*written, *complete(collector.copy())):
        check_nested(spans, slack_s)
    # All are told in full but those of the last steps, whose versions nobody may have loaded.
    assert len(written) >= sum(batches(process)[:-3]) > 0
    services = {span["service"] for spans in written for span in spans}
    assert services == {"buffer", "generator-0", "weight-hub"}


@pytest.mark.e2e
@pytest.mark.timeout(240)
def test_a_receiver_that_is_down_holds_up_nothing(
    up: Callable[..., UpProcess],  # noqa: F811
) -> None:
    process = up("run.steps=100000", "log.traced_share=1.0")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there, nor will
        check_nothing_waits(process, f"http://127.0.0.1:{taken.getsockname()[1]}")


def check_nothing_waits(process: UpProcess, url: str) -> None:
    """The run goes on while its monitor cannot send to `url`, and both say what they should."""
    with watching(process.broker(), url) as monitor:
        assert monitor.stderr is not None
        complaint = monitor.stderr.readline()  # of the exporter
        steps = len(process.steps())
        process.until(lambda: len(process.steps()) > steps + 1, "another step")
        process.popen.send_signal(signal.SIGINT)
        assert process.finish()["ledger"]["balance"] == 0
        said = ended(monitor)
    assert complaint
    assert "spans did not reach the OpenTelemetry receiver" in said


def test_without_the_extra_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fakes.looks import status

    from umbra.services.monitor.watch import Look, Watch

    monkeypatch.setattr(Watch, "look", lambda *_: Look(status()))
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "umbra.services.monitor.telemetry", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    code = cli.main(["monitor", "--broker", "tcp://127.0.0.1:1", "--otlp", "http://x", "--once"])
    told = capsys.readouterr().err
    assert code == 2
    assert told == "umbra: error: opentelemetry is not installed: pip install 'umbra-rl[otel]'\n"
