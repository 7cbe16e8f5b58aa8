"""Which requests an HTTP server answers, by their heads."""

import hmac
from contextlib import closing
from unittest.mock import patch

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
JSON, TEXT = (("content-type", kind) for kind in ("application/json", "text/plain"))
SHORT = ("content-length", "9")


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("localhost:8080", ""),
        ("127.0.0.1", ""),
        ("[::1]:8080", ""),
        ("evil.example:8080", "wrong_host"),
        ("localhost.evil.example", "wrong_host"),
        ("127.0.0.1.evil.example", "wrong_host"),
        ("", "wrong_host"),
    ],
)
def test_a_local_server_is_called_by_a_local_name(host: str, code: str) -> None:
    assert refused(("host", host)) == code
    assert refused(("host", host), local=False) == ""


@pytest.mark.parametrize(
    ("origins", "code"),
    [
        (["http://127.0.0.1:80"], ""),
        (["https://127.0.0.1:80"], ""),  # behind a proxy that speaks TLS
        (["http://127.0.0.1:81"], "wrong_origin"),
        (["https://evil.example"], "wrong_origin"),
        (["http://127.0.0.1:80", "null"], "wrong_origin"),  # each counts
    ],
)
@pytest.mark.parametrize("local", [True, False])
def test_no_page_from_elsewhere_asks(origins: list[str], code: str, local: bool) -> None:
    assert refused(HERE, *(("origin", one) for one in origins), local=local) == code


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], ""),  # without a body
        ([("content-type", "Application/JSON; charset=utf-8"), SHORT], ""),
        ([SHORT], "wrong_type"),
        ([("transfer-encoding", "chunked")], "wrong_type"),
        ([TEXT, SHORT], "wrong_type"),
        ([JSON, TEXT, SHORT], "wrong_type"),
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
def test_the_key_is_compared_in_constant_time(given: str | None, code: str) -> None:
    headers = [HERE] if given is None else [HERE, ("authorization", given)]
    with patch.object(hmac, "compare_digest", wraps=hmac.compare_digest) as compare:
        assert refused(*headers, key="secret") == code
    assert [call.args[1] for call in compare.call_args_list] == [b"secret"]
