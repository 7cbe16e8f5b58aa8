"""The page and the figures for Prometheus over HTTP, of a run that a small server plays."""

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from fakes.looks import PUSH, heard, look, status
from fakes.slowness import limit

from umbra.services.monitor.web import PageServer, prometheus_text

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
