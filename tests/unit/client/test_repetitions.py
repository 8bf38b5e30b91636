"""Repetitions of the client: the calls that it sends again, how long, and to which of several gateways."""

from typing import Any

import httpx
import pytest

import qinfer
from qinfer import errors
from tests.support.scripted_gateway import Server, X, accepted, answer, reply

BUSY = reply(503, error="Exceeds maximum queue size")
CUT = httpx.ReadError("cut")
REFUSED = httpx.ConnectError("refused")
SEVERAL = ["http://a", "http://b/prefix", "http://c"]


def hosts(server: Server) -> list[str]:
    return [str(request.url.host) for request in server.requests]


@pytest.mark.parametrize("outcome", [BUSY, CUT, REFUSED], ids=["busy", "cut", "refused"])
def test_a_call_is_repeated_until_its_time_is_over(outcome: httpx.Response | Exception) -> None:
    server = Server(outcome)

    with pytest.raises(errors.QinferError):
        server.client(timeout_s=300.0).infer("m", {"x": X})

    assert 290.0 < sum(server.pauses) < 300.0
    assert len(server.requests) > 50


def test_a_call_may_have_a_time_of_its_own() -> None:
    server = Server(BUSY)

    with pytest.raises(errors.Overloaded):
        server.client(timeout_s=300.0).infer("m", {"x": X}, timeout_s=10.0)

    assert 5.0 < sum(server.pauses) < 10.0


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("inf"), "5"])
def test_a_time_that_is_none(timeout_s: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="timeout_s is"):
        Server(answer()).client().infer("m", {"x": X}, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("outcome", "attempts"),
    [(CUT, 1), (reply(504, error="late"), 1), (BUSY, 2), (REFUSED, 2)],
    ids=["cut", "late", "busy", "refused"],
)
def test_without_resend_only_what_was_not_accepted_is_repeated(outcome: Any, attempts: int) -> None:
    """A request that may be executing is not sent again."""
    server = Server(outcome, answer())

    if attempts == 1:
        with pytest.raises(errors.Unreachable):
            server.client(resend=False).infer("m", {"x": X})
    else:
        server.client(resend=False).infer("m", {"x": X})

    assert len(server.requests) == attempts


def test_without_resend_what_has_a_key_is_repeated() -> None:
    """The gateway knows it by the key, and reading changes nothing."""
    server = Server(CUT, accepted(), CUT, answer())
    client = server.client(resend=False)

    client.result(client.submit("m", {"x": X}))

    assert len(server.requests) == 4


def test_without_resend_a_numbered_step_is_repeated() -> None:
    server = Server(CUT, answer())

    server.client(resend=False).sequence("m").infer({"x": X})

    assert len(server.requests) == 2


def test_a_step_without_a_number_is_sent_once() -> None:
    server = Server(CUT, answer())

    with pytest.raises(errors.Unreachable):
        server.client().infer("m", {"x": X}, parameters={"sequence_id": 7})

    assert len(server.requests) == 1


def test_a_mode_without_control_is_said_at_once() -> None:
    """It is a 503 too, and no repetition changes it."""
    server = Server(reply(503, error="explicit model load / unload is not allowed if polling is enabled"))

    with pytest.raises(errors.ControlDisabled):
        server.client().load("m")

    assert len(server.requests) == 1


def test_another_gateway_is_asked_at_once() -> None:
    """Without a pause; it stays the one that is asked, with the path below its URL."""
    server = Server(REFUSED, answer(), answer())
    client = server.client(SEVERAL)

    client.infer("m", {"x": X})
    client.infer("m", {"x": X})

    assert hosts(server) == ["a", "b", "b"]
    assert server.requests[1].url.path == "/prefix/v2/models/m/infer"
    assert server.pauses == []


def test_a_round_of_all_gateways_is_followed_by_a_pause() -> None:
    server = Server(REFUSED, REFUSED, REFUSED, REFUSED, answer())

    server.client(SEVERAL).infer("m", {"x": X})

    assert hosts(server) == ["a", "b", "c", "a", "b"]
    assert len(server.pauses) == 1


def test_a_gateway_that_refuses_is_not_left() -> None:
    """The queue behind all of them is full."""
    server = Server(BUSY, answer())

    server.client(SEVERAL).infer("m", {"x": X})

    assert hosts(server) == ["a", "a"]


def test_asking_another_gateway_is_no_repetition_of_what_was_not_sent() -> None:
    server, sent = Server(REFUSED, answer()), Server(CUT, answer())

    server.client(SEVERAL, max_retries=0).infer("m", {"x": X})
    with pytest.raises(errors.Unreachable):
        sent.client(SEVERAL, max_retries=0).infer("m", {"x": X})

    assert (hosts(server), hosts(sent)) == (["a", "b"], ["a"])


@pytest.mark.parametrize(("outcomes", "live"), [((REFUSED, httpx.Response(200)), True), ((REFUSED,), False)])
def test_one_live_gateway_is_enough(outcomes: tuple[Any, ...], *, live: bool) -> None:
    server = Server(*outcomes)

    assert server.client(SEVERAL).is_live() is live
    assert hosts(server) == (["a", "b"] if live else ["a", "b", "c"])


def test_each_gateway_has_the_password_of_its_url() -> None:
    server = Server(REFUSED, REFUSED, answer())

    with server.client(["http://a", "http://us%40er:pa%3Ass@b", "http://c"], api_key="") as client:
        client.infer("m", {"x": X})

    assert ["Authorization" in request.headers for request in server.requests] == [False, True, False]
    assert server.requests[1].headers["Authorization"] == httpx.BasicAuth("us@er", "pa:ss")._auth_header


def test_the_key_of_the_environment_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none is given; an empty one is none."""
    monkeypatch.setenv("QINFER_API_KEY", "of the shell".replace(" ", "-"))
    server = Server(answer())

    for key in (None, "own", ""):
        server.client(api_key=key).infer("m", {"x": X})

    found = [request.headers.get("Authorization") for request in server.requests]
    assert found == ["Bearer of-the-shell", "Bearer own", None]


def test_a_wrong_key_of_the_environment_is_named_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QINFER_API_KEY", "gehe\nim")

    with pytest.raises(errors.InvalidRequest, match="the value for QINFER_API_KEY") as caught:
        qinfer.Client("http://gateway")

    assert "gehe" not in caught.value.message


def test_headers_of_the_client_and_of_the_call() -> None:
    """The call's win, and never over those that describe its body."""
    server = Server(answer())
    client = server.client(headers={"X-Team": "a", "X-Place": "here"})

    client.infer("m", {"x": X}, headers={"X-Team": "b", "Content-Type": "text/plain"})

    (sent,) = server.requests
    assert (sent.headers["X-Team"], sent.headers["X-Place"]) == ("b", "here")
    assert sent.headers["Content-Type"] == "application/octet-stream"
