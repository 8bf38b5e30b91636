"""Errors that the client raises: for each status, each error code, each broken connection and each wrong argument."""

import math
import ssl
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import httpx
import numpy as np
import pytest

import qinfer
from qinfer import errors
from qinfer.client.steps import BY_CODE, BY_STATUS
from qinfer.errors import ErrorCode, QinferError
from tests.support.scripted_gateway import Server, X, answer, reply


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (httpx.ConnectError("refused"), errors.Unreachable, "no server answers at http://gateway; start one"),
        (httpx.ConnectTimeout("late"), errors.Unreachable, "no server answers"),
        (httpx.ReadError(""), errors.Unreachable, "the connection to http://gateway failed: ReadError"),
        (httpx.RemoteProtocolError("no reply"), errors.Unreachable, "no reply; if the server has TLS, .* https://"),
        (httpx.ReadTimeout("late"), errors.DeadlineExceeded, "no answer within 60 s"),
        (httpx.DecodingError("bad gzip"), errors.Unreachable, "bad gzip"),
    ],
    ids=["refused", "connect-timeout", "cut", "no-http", "read-timeout", "gzip"],
)
def test_what_breaks_a_connection_is_named(error: Exception, raised: type[QinferError], message: str) -> None:
    """No error of httpx reaches the caller."""
    with pytest.raises(raised, match=message):
        Server(error).client(max_retries=1).infer("m", {"x": X})


STATUSES = [
    (400, errors.InvalidRequest),
    (401, errors.Unauthorized),
    (403, errors.Forbidden),
    (404, errors.ModelNotFound),
    (405, errors.UnsupportedFeature),
    (409, errors.Conflict),
    (410, errors.ResultExpired),
    (413, errors.PayloadTooLarge),
    (415, errors.UnsupportedFeature),
    (418, errors.RequestError),
    (422, errors.InvalidRequest),
    (429, errors.Overloaded),
    (500, errors.InferenceFailed),
    (501, errors.UnsupportedFeature),
    (502, errors.Unreachable),
    (503, errors.Overloaded),
    (504, errors.Unreachable),
    (507, QinferError),
    (302, errors.Unreachable),
]


@pytest.mark.parametrize(("status", "raised"), STATUSES)
def test_every_status_has_its_error(status: int, raised: type[QinferError]) -> None:
    """The text is the server's."""
    with pytest.raises(QinferError, match="what the server said") as caught:
        Server(reply(status, error="what the server said")).client(max_retries=0).infer("m", {"x": X})

    assert type(caught.value) is raised


def test_a_value_of_the_wrong_type_is_no_failure_of_the_model() -> None:
    """Triton answers 500 to both."""
    text = "Unable to parse 'timeout': attempt to access JSON non-unsigned-integer as unsigned-integer"

    with pytest.raises(errors.MalformedJson, match="Unable to parse 'timeout'"):
        Server(reply(500, error=text)).client().infer("m", {"x": X}, parameters={"timeout": 1.5})


@pytest.mark.parametrize("text", [errors.TIMED_OUT, errors.BACKLOG_TIMED_OUT])
def test_a_request_that_expired_is_not_sent_again(text: str) -> None:
    """Triton's protocol tells it from a full queue by its text only; to repeat it would execute it again."""
    server = Server(reply(503, error=f"[request id: 7] {text}"))

    with pytest.raises(errors.DeadlineExceeded, match=text):
        server.client().infer("m", {"x": X})

    assert len(server.requests) == 1


def test_the_table_of_statuses_is_tested_whole() -> None:
    """A row more in the table is a row more in the test."""
    assert set(BY_STATUS) <= {status for status, _ in STATUSES}


@pytest.mark.parametrize("code", ErrorCode)
def test_a_code_in_the_reply_is_exact(code: ErrorCode) -> None:
    """Where the server names its error code, the status does not matter."""
    with pytest.raises(QinferError) as caught:
        Server(reply(500, error="why", code=code.value)).client(max_retries=0).infer("m", {"x": X})

    assert caught.value.code == code
    assert type(caught.value) is BY_CODE[code]


def test_a_page_of_a_proxy_is_an_error_too() -> None:
    """Without the server's text the status has to do."""
    with pytest.raises(errors.Unreachable, match="HTTP 502 Bad Gateway"):
        Server(httpx.Response(502, content=b"<html>")).client(max_retries=0).infer("m", {"x": X})


@pytest.mark.parametrize(
    "ask",
    [lambda c: c.metadata("m"), lambda c: c.status("i"), lambda c: c.submit("m", {"x": X})],
    ids=["metadata", "status", "submit"],
)
@pytest.mark.parametrize("body", [b"<html>", b'{"name": 1}'], ids=["html", "json"])
def test_something_else_at_the_url(ask: Callable[[qinfer.Client], Any], body: bytes) -> None:
    """200 from what is no gateway is an error, or has no content; never a traceback of a parser."""
    try:
        found = ask(Server(httpx.Response(200, content=body)).client())
    except errors.Unreachable as error:
        assert "is it a gateway?" in error.message  # noqa: PT017
    else:
        assert found.state == ""


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("gateway:8000", {}),
        ("ftp://gateway", {}),
        ("", {}),
        ("http://gateway:eighty", {}),
        ("http://gateway", {"timeout_s": 0}),
        ("http://gateway", {"timeout_s": math.inf}),
        ("http://gateway", {"timeout_s": "5"}),
        ([], {}),
        (None, {}),
        (["http://gateway", "gateway"], {}),
        ("http://gateway?x=1", {}),
        ("http://gateway", {"max_retries": "many"}),
        ("http://gateway", {"max_retries": -1}),
        ("http://gateway", {"api_key": "sec\nret"}),
        ("http://gateway", {"headers": {"a b": "c"}}),
        ("http://gateway", {"headers": {"a": "sec\nret"}}),
        ("http://gateway", {"headers": ["a"]}),
        ("http://gateway", {"ca_file": "/nowhere.pem"}),
        ("http://gateway", {"ca_file": __file__}),
    ],
)
def test_wrong_arguments(url: str, options: dict[str, Any]) -> None:
    """Each is found when the client is made, and no secret is shown."""
    with pytest.raises(errors.InvalidRequest) as caught:
        qinfer.Client(url, **options)

    assert "sec" not in caught.value.message.replace("seconds", "")


def test_a_closed_client_says_so() -> None:
    """Calls after the `with` block are a mistake of the caller's."""
    client = Server(answer()).client()
    client.close()

    with pytest.raises(errors.InvalidRequest, match="the client is closed"):
        client.infer("m", {"x": X})


def test_a_password_in_the_url_is_not_shown() -> None:
    """Error texts end in logs."""
    client = qinfer.Client(
        "http://user:secret@gateway", max_retries=0, transport=httpx.MockTransport(Server(httpx.ConnectError("no")))
    )

    with pytest.raises(errors.Unreachable) as caught:
        client.infer("m", {"x": X})

    assert "secret" not in caught.value.message


@pytest.mark.parametrize("value", [None, {1.0}, object()], ids=["none", "set", "object"])
def test_an_input_that_is_no_array(value: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"input 'x' is of type .*; make it a numpy array, or lists"):
        Server(answer()).client().infer("m", {"x": value})


@pytest.mark.parametrize(
    "wrong",
    [
        {"parameters": {"count": np.int64(3)}},
        {"parameters": {"raw": b"abc"}},
        {"parameters": {"price": Decimal("1.5")}},
        {"parameters": {1: "one"}},
        {"parameters": {"text": "\ud800"}},
        {"id": "\ud800"},
        {"outputs": "label"},
        {"inputs": [X]},
        {"inputs": {1: X}},
        {"inputs": {"x": np.array(["\ud800"], dtype=object)}},
        {"inputs": {"x": np.ma.masked_array([1.0], [True])}},
        {"parameters": [1]},
        {"id": 5},
        {"outputs": [1]},
        {"priority": -1},
        {"priority": 2**64},
        {"priority": "high"},
        {"model": None},
        {"model": "\ud800"},
        {"model": "m" * 100_000},
    ],
)
def test_what_can_not_be_sent(wrong: dict[str, Any]) -> None:
    """It is an error of qinfer's, so that a stream goes on with the next input; nothing is sent."""
    server = Server(answer())

    with pytest.raises(errors.InvalidRequest):
        server.client().infer(**{"model": "m", "inputs": {"x": X}, **wrong})

    assert server.requests == []


@pytest.mark.parametrize(
    "wrong",
    [{"idempotency_key": 0}, {"idempotency_key": ""}, {"request_id": 5}, {"timeout_s": "600"}, {"webhook": ""}],
    ids=str,
)
def test_what_a_request_can_not_be_submitted_with(wrong: dict[str, Any]) -> None:
    """A key that is empty is none that the caller meant: another in its place would have the request run again."""
    server = Server(answer())

    with pytest.raises(errors.InvalidRequest):
        server.client().submit("m", {"x": X}, **wrong)

    assert server.requests == []


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.result(None),
        lambda c: c.result("r1", wait_s=None),
        lambda c: c.result("r1", wait_s=math.nan),
        lambda c: c.status("x" * 100_000),
        lambda c: c.job(None).status(),
        lambda c: c.job("j1").resume(error_threshold=np.float32(0.1)),
    ],
    ids=["no request", "no time", "nan", "long id", "no job", "change"],
)
def test_wrong_names_and_changes(ask: Callable[[qinfer.Client], Any]) -> None:
    """No error of httpx or msgspec reaches the caller."""
    server = Server(answer())

    with pytest.raises(errors.InvalidRequest):
        ask(server.client())

    assert server.requests == []


def test_a_wrong_certificate_is_no_absent_server() -> None:
    """To start one would not help."""
    error = httpx.ConnectError("verify failed")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed")

    server = Server(error)

    with pytest.raises(errors.Unreachable, match=r"no secure connection .* check the URL's scheme"):
        server.client().infer("m", {"x": X})

    assert len(server.requests) == 1
