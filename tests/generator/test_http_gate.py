"""Which requests an HTTP server answers, by their heads."""

import hmac
from contextlib import closing
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.responses import Response

from umbra.services.http import ApiError, HttpServer, listen


def refused(*headers: tuple[str, str], local: bool = True, key: str = "", body: int = 100) -> str:
    """The code with which a request with these headers is refused; "" if it is answered."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    try:
        with closing(listen("127.0.0.1:0" if local else "0.0.0.0:0", "--web")) as bound:
            server = HttpServer(Response(), bound, key=key, max_body=body, requests=1)
            server.check(Headers(raw=raw))
    except ApiError as refused:
        return refused.code
    return ""


HERE = ("host", "127.0.0.1:80")
JSON = ("content-type", "application/json")


@pytest.mark.parametrize(
    ("host", "local", "code"),
    [
        ("localhost:8080", True, ""),
        ("127.0.0.1", True, ""),
        ("[::1]:8080", True, ""),
        ("evil.example:8080", True, "wrong_host"),
        ("localhost.evil.example", True, "wrong_host"),
        ("127.0.0.1.evil.example", True, "wrong_host"),
        ("", True, "wrong_host"),
        ("host.example:8080", False, ""),
    ],
)
def test_a_local_server_is_called_by_a_local_name(host: str, local: bool, code: str) -> None:
    assert refused(("host", host), local=local) == code


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        ("http://127.0.0.1:80", ""),
        ("https://127.0.0.1:80", ""),  # behind a proxy that speaks TLS
        ("http://127.0.0.1:81", "wrong_origin"),
        ("https://evil.example", "wrong_origin"),
        ("null", "wrong_origin"),
    ],
)
@pytest.mark.parametrize("local", [True, False])
def test_no_page_from_elsewhere_asks(origin: str, code: str, local: bool) -> None:
    assert refused(HERE, ("origin", origin), local=local) == code


def test_each_origin_counts() -> None:
    assert refused(HERE, ("origin", "http://127.0.0.1:80"), ("origin", "null")) == "wrong_origin"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], ""),  # without a body
        ([("content-type", "Application/JSON; charset=utf-8"), ("content-length", "9")], ""),
        ([("content-length", "9")], "wrong_type"),
        ([("transfer-encoding", "chunked")], "wrong_type"),
        ([("content-type", "text/plain"), ("content-length", "9")], "wrong_type"),
        ([("content-type", "application/x-www-form-urlencoded")], "wrong_type"),
        ([JSON, ("content-type", "text/plain"), ("content-length", "9")], "wrong_type"),
        ([JSON, ("content-length", "100")], ""),
        ([JSON, ("content-length", "101")], "too_large"),
    ],
)
def test_a_body_is_json_and_not_too_long(headers: list[tuple[str, str]], code: str) -> None:
    assert refused(HERE, *headers) == code


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("Bearer secret", ""),
        ("Bearer secre", "invalid_api_key"),
        ("Bearer secrets", "invalid_api_key"),
        ("Bearer \xff", "invalid_api_key"),
        (None, "invalid_api_key"),
    ],
)
def test_the_key_is_compared_in_constant_time(
    given: str | None, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[tuple[Any, Any]]()
    compare = hmac.compare_digest

    def spy(one: Any, other: Any) -> bool:
        compared.append((one, other))
        return compare(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    headers = [HERE] if given is None else [HERE, ("authorization", given)]
    assert refused(*headers, key="secret") == code
    assert [other for _, other in compared] == [b"secret"]
