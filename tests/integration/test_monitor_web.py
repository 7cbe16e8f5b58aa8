"""Watching a run: its page and figures for Prometheus over HTTP, and its events over sockets."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from fakes.broker_world import world
from fakes.looks import PUSH, heard, look, status
from fakes.serving import ServerThread
from fakes.slowness import limit, until

from umbra.proto.access import SOCKETS, KeyRole
from umbra.proto.messages import (
    Heartbeat,
    HeartbeatAck,
    Join,
    Message,
    Ok,
    Rates,
    StatusRequest,
    Welcome,
)
from umbra.proto.net.keys import OPEN, Security, make_keys, open_security
from umbra.proto.net.server import Request, Server
from umbra.proto.net.session import Session
from umbra.proto.records import Ledger, Role, State
from umbra.proto.sockets import Context
from umbra.services.buffer.health import SHARES, SHOWN
from umbra.services.monitor.client import Look, Watch
from umbra.services.monitor.web import PageServer, prometheus_text
from umbra.services.process.metrics import MetricsFile
from umbra.services.reporting import PHASES

WAIT_S = limit(20.0)
LINE = re.compile(r'[a-z_]+\{([a-z_]+="([^"\\\n]|\\.)*",?)+\} [-+0-9.eInfNa]+')


@pytest.fixture
def server() -> Iterator[PageServer]:
    spans = [["decode", 100.0 + i, 100.8 + i] for i in range(60)]
    look = heard(("push", PUSH), ("spans", {"spans": spans})).look(status())
    with closing(PageServer(":0", look)) as server:
        assert server.is_local
        yield server


def get(
    server: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, bytes, Any]:
    address = server.url.removeprefix("http://")
    with closing(http.client.HTTPConnection(address, timeout=WAIT_S)) as client:
        client.request(method, path, headers=headers)
        answer = client.getresponse()
        return answer.status, answer.read(), answer.headers


def test_the_page_is_served_with_all_it_needs(server: PageServer) -> None:
    code, page, headers = get(server, "/")
    assert code == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    for name in re.findall(rb'(?:src|href)="([^"]+)"', page):
        assert name.startswith(b"data:") or get(server, f"/{name.decode()}")[0] == 200
    assert b"://" not in page + get(server, "/page.css")[1]
    script = get(server, "/page.js")[1].replace(b'"http://www.w3.org/2000/svg"', b"")
    assert b"://" not in script
    assert b"innerHTML" not in script


def test_a_run_that_is_lost_is_shown_as_it_was(server: PageServer) -> None:
    server.lose()
    values = json.loads(get(server, "/look.json")[1])
    assert values["lost"] is True
    assert values["run_id"] == "run-1"
    assert b'umbra_up{run="run-1"} 0.0' in get(server, "/metrics")[1]


def test_what_is_seldom_asked_is_made_once(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    encode = "umbra.services.monitor.web.msgspec.json.encode"
    monkeypatch.setattr(encode, lambda values: made.append(values) or b"{}")
    for _ in range(20):
        get(server, "/look.json")
    (values,) = made
    assert 24 < len(values["spans"]["m"]) < 30, "the last seconds"


@pytest.mark.parametrize(
    ("path", "method", "host", "code"),
    [
        ("/nothing", "GET", "localhost:1", 404),
        ("/../../etc/passwd", "GET", "localhost:1", 404),
        ("/", "POST", "localhost:1", 405),
        ("/", "GET", "evil.example:1", 403),
        ("/metrics", "GET", "evil.example:1", 403),
        ("/?x=1", "GET", "127.0.0.1", 200),
        ("/metrics", "GET", "[::1]:9", 200),
    ],
)
def test_it_only_answers_what_it_should(
    server: PageServer, path: str, method: str, host: str, code: int
) -> None:
    assert get(server, path, method, Host=host)[0] == code
    assert get(server, "/look.json", Origin="http://evil.example")[0] == 403
    assert get(server, "/look.json", Origin=server.url)[0] == 200


def test_figures_for_prometheus() -> None:
    text = prometheus_text(look()).decode()
    lines = text.splitlines()
    assert text.endswith("\n")
    for line in lines:
        assert line.startswith(("# HELP umbra_", "# TYPE umbra_")) or LINE.fullmatch(line), line
    for expected in (
        'umbra_samples_trained_total{run="run-1"} 80.0',
        'umbra_member_share{activity="idle: work",member="generator-0",run="run-1"} 0.3',
        'umbra_push_seconds{phase="wire",receiver="generator-0",run="run-1"} 0.0123',
        'umbra_curve{name="reward/mean",run="run-1"} 0.875',
        'umbra_trained_by_staleness_total{run="run-1",staleness="1"} 60.0',
        'umbra_member_stat{member="generator-0",name="decoded_per_s",run="run-1"} 4321.0',
        'umbra_up{run="run-1"} 1.0',
    ):
        assert expected in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    odd = look(run_id='a "b"\\\n')
    assert 'umbra_up{run="a \\"b\\"\\\\\\n"} 1.0' in prometheus_text(odd).decode()


# -- over real sockets, with keys and without, while the run is not disturbed ----------------------

SecurityOf = Callable[[KeyRole], Security]


@pytest.fixture(params=["keys", "no keys"])
def security(request: pytest.FixtureRequest, tmp_path: Path) -> SecurityOf:
    if request.param == "no keys":
        return lambda _role: OPEN
    make_keys(tmp_path)
    return lambda role: open_security(str(tmp_path), [role])


class Buffer(ServerThread):
    def __init__(self, context: Context, security: Security) -> None:
        server = Server(context, "buffer", "b1", security)
        self.endpoint = server.bind("control", "tcp://127.0.0.1:*", SOCKETS["control"])
        self.events = server.bind_events("tcp://127.0.0.1:*")
        super().__init__(server, self._answer)

    def _answer(self, request: Request) -> Message:
        match request.body:
            case StatusRequest():
                return status(events=self.events)
            case Join():
                return Welcome(run_id="r", heartbeat_s=0.05, data=self.endpoint)
            case Heartbeat():
                return HeartbeatAck(version=7)
            case _:
                return Ok()


@pytest.fixture
def buffer(zmq_context: Context, security: SecurityOf) -> Iterator[Buffer]:
    with closing(Buffer(zmq_context, security("buffer"))) as made:
        yield made


def test_any_number_watch_and_see_the_same(buffer: Buffer, security: SecurityOf) -> None:
    metrics = MetricsFile(None, "generator-0")
    watches = [Watch(buffer.endpoint, security("monitor")) for _ in range(3)]
    role: Role = "generator"
    name, key = metrics.service, security(role)
    with Session(role=role, name=name, broker=buffer.endpoint, metrics=metrics, security=key):

        def both(watch: Watch) -> Look | None:
            metrics.write("push", **PUSH)
            metrics.write("span", name="decode", start=1.0, end=2.0)
            look = watch.look(WAIT_S)
            seen = {span.name for span in look.spans.get("generator-0", [])}
            return look if seen == {"push", "decode"} else None

        for watch in watches:
            with watch:
                look = until(partial(both, watch), "a look at both")  # telemetry may be lost
                assert look.pushes[0].wire_s == PUSH["wire_s"]
    senders = {key[1].partition(b".")[0] for key in buffer.server.resends._known}
    assert senders == {b"generator-0"}, "of the watchers nothing stays"


@pytest.mark.parametrize("security", ["no keys"], indirect=True)
def test_the_page_and_the_figures(buffer: Buffer) -> None:
    """Both are served at the address that is printed, until Ctrl-C."""
    command = ["--broker", buffer.endpoint, "--web", "127.0.0.1:0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "umbra", "monitor", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
    )
    try:
        assert process.stderr is not None
        page = process.stderr.readline().strip()
        with urllib.request.urlopen(page, timeout=WAIT_S) as answer:
            assert b"page.js" in answer.read()
        with urllib.request.urlopen(f"{page}metrics", timeout=WAIT_S) as answer:
            assert b'umbra_up{run="run-1"} 1.0' in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


# -- the alerts and the dashboard in examples/monitoring -------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
# By label of a metric, what it may say.
VALUES: dict[str, set[str]] = {
    "umbra_warning name": set(SHARES),
    "umbra_rate figure": set(Rates.__struct_fields__),
    "umbra_curve name": set(SHOWN),
    "umbra_push_seconds phase": set(PHASES),
    "umbra_member_up role": set(get_args(Role)),
    "umbra_member_up state": set(get_args(State)),
    "umbra_staleness_steps figure": set(world().broker.status(0.0).staleness),
    "umbra_samples_ended_total reason": {"stale"},
}


def test_every_figure_and_label_that_they_ask_for_exists() -> None:
    looks = look(), look(ledger=Ledger(issued=1, ended={"stale": 1}))
    exported = "".join(prometheus_text(seen).decode() for seen in looks)
    labels: dict[str, set[str]] = {}
    for name, own in re.findall(r"^(umbra_\w+)\{(.*)\} ", exported, re.M):
        labels.setdefault(name, set()).update(re.findall(r'(\w+)="', own))
    alerts = yaml.safe_load((EXAMPLES / "umbra-alerts.yaml").read_text(encoding="utf-8"))
    dashboard = json.loads((EXAMPLES / "umbra-dashboard.json").read_text(encoding="utf-8"))
    asked = [rule["expr"] for rule in alerts["groups"][0]["rules"]]
    asked += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    page = (EXAMPLES.parents[1] / "docs" / "operate.md").read_text(encoding="utf-8")
    for expression in asked:
        series = re.findall(r"(umbra_\w+)(?:\{([^}]*)\})?", expression)
        assert series, expression
        for name, selectors in series:
            assert name in labels, f"{name} is exported by no run"
            for label, value in re.findall(r'(\w+)=~?"([^"]*)"', selectors):
                assert label in labels[name], f"{name} has no label {label}"
                if label == "run":
                    continue
                told = set(value.split("|"))
                if name == "umbra_member_stat":
                    assert all(f"`{one}`" in page for one in told), told
                else:
                    assert told <= VALUES[f"{name} {label}"], told
