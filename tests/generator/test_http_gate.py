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


def test_a_local_server_is_called_by_a_local_name() -> None:
    for host in ("localhost:8080", "127.0.0.1", "[::1]:8080"):
        assert refused(("host", host)) == ""
    for host in ("evil.example:8", "localhost.evil.example", "127.0.0.1.evil.example", ""):
        assert refused(("host", host)) == "wrong_host"
        assert refused(("host", host), local=False) == ""


@pytest.mark.parametrize("local", [True, False])
def test_no_page_from_elsewhere_asks(local: bool) -> None:
    for origins, code in (
        (["http://127.0.0.1:80"], ""),
        (["https://127.0.0.1:80"], ""),  # behind a proxy that speaks TLS
        (["http://127.0.0.1:81"], "wrong_origin"),
        (["https://evil.example"], "wrong_origin"),
        (["http://127.0.0.1:80", "null"], "wrong_origin"),  # each counts
    ):
        assert refused(HERE, *(("origin", one) for one in origins), local=local) == code


def test_a_body_is_json_and_not_too_long() -> None:
    for headers, code in (
        ([], ""),  # without a body
        ([("content-type", "Application/JSON; charset=utf-8"), SHORT], ""),
        ([SHORT], "wrong_type"),
        ([("transfer-encoding", "chunked")], "wrong_type"),
        ([TEXT, SHORT], "wrong_type"),
        ([JSON, TEXT, SHORT], "wrong_type"),
        ([JSON, ("content-length", "100")], ""),
        ([JSON, ("content-length", "101")], "too_large"),
    ):
        assert refused(HERE, *headers) == code


def test_the_key_is_compared_in_constant_time() -> None:
    for given in ("Bearer secret", "Bearer secre", "Bearer secrets", "Bearer \xff", None):
        headers = [HERE] if given is None else [HERE, ("authorization", given)]
        code = "" if given == "Bearer secret" else "invalid_api_key"
        with patch.object(hmac, "compare_digest", wraps=hmac.compare_digest) as compare:
            assert refused(*headers, key="secret") == code
        assert [call.args[1] for call in compare.call_args_list] == [b"secret"]
