"""Visitors refuse requests that may come from a stranger's page."""

from typing import Any

import pytest

from qinfer.core.settings import Settings
from qinfer_api.http.head import Visitors

HERE = [(b"Host", b"localhost:8000")]


def visitors(**sections: dict[str, Any]) -> Visitors | None:
    return Visitors.from_settings(Settings.model_validate(sections))


def problem(headers: list[tuple[bytes, bytes]], **sections: dict[str, Any]) -> str:
    found = visitors(**sections)
    return "" if found is None else found.problem(headers)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "app.localhost:8000",
        "127.0.0.1:8000",
        "127.8.9.1",
        "[::1]:8000",
        "10.0.0.7:8000",
        "",
    ],
)
def test_a_server_on_loopback_answers_to_names_of_this_machine(host: str) -> None:
    """An address is safe: a browser sends it to where it leads only."""
    assert problem([(b"host", host.encode())]) == ""
    assert problem([(b":authority", host.encode())]) == ""


@pytest.mark.parametrize("name", [b"host", b"Host", b":authority"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io"])
def test_a_name_that_was_pointed_here_is_refused(name: bytes, host: str) -> None:
    assert problem([(name, host.encode())]) == f"'{host}' is not a name of this server: QINFER_HTTP__ALLOW_HOSTS"


def test_one_of_several_names_is_enough() -> None:
    assert problem([*HERE, (b"host", b"evil.example")])


@pytest.mark.parametrize("section", ["http", "grpc", "metrics"])
def test_a_server_that_others_reach_has_any_name(section: str) -> None:
    """Services, compose and pods have names of their own."""
    given: dict[str, Any] = {section: {"host": "0.0.0.0"}, "auth": {"mode": "none"}}

    assert problem([(b"host", b"qinfer.default.svc:8000")], **given) == ""


def test_names_may_be_listed() -> None:
    listed: dict[str, Any] = {"http": {"host": "0.0.0.0", "allow_hosts": ["Models.example"]}, "auth": {"mode": "none"}}

    assert problem([(b"host", b"models.example:443")], **listed) == ""
    assert problem([(b"host", b"other.example")], **listed)
    assert problem([(b"host", b"evil.example")], http={"allow_hosts": ["*"]}) == ""


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b"http://localhost:3000", b"https://127.0.0.1"])
def test_a_page_of_another_origin_is_refused(origin: bytes) -> None:
    text = f"pages of '{origin.decode()}' may not call this server: QINFER_CORS__ALLOW_ORIGINS"

    assert problem([*HERE, (b"Origin", origin)]) == text


def test_the_servers_own_pages_may_call() -> None:
    own = [*HERE, (b"origin", b"http://localhost:8000"), (b"sec-fetch-site", b"same-origin")]

    assert problem(own) == ""


def test_a_page_without_an_origin_is_not_the_servers_own() -> None:
    assert problem([(b"host", b""), (b"origin", b"null")])


def test_one_of_several_origins_is_enough() -> None:
    assert problem([*HERE, (b"origin", b"http://localhost:8000"), (b"origin", b"http://evil.example")])


def test_pages_that_cors_names_may_call() -> None:
    app = [*HERE, (b"origin", b"https://app.example"), (b"sec-fetch-site", b"cross-site")]

    assert problem(app)
    assert problem(app, cors={"allow_origins": ["https://app.example"]}) == ""
    assert problem(app, cors={"allow_origins": ["*"]}) == ""


def test_another_site_without_an_origin_is_refused() -> None:
    """An image, a script or a form by GET."""
    assert problem([*HERE, (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"no-cors")])


def test_a_link_to_a_page_of_the_server_may_be_followed() -> None:
    visit = [(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"document")]

    assert problem([*HERE, *visit]) == ""
    assert problem([*HERE, *visit, (b"origin", b"http://evil.example")])  # a form by POST


def test_keys_keep_pages_apart_by_themselves() -> None:
    with_keys: dict[str, Any] = {"auth": {"mode": "keys", "keys_file": "keys.json"}}

    assert visitors(**with_keys) is None
    assert problem([(b"host", b"evil.example")], **with_keys, http={"allow_hosts": ["q.example"]})


def test_clients_that_are_no_browsers_are_plain() -> None:
    found = visitors()
    assert found is not None

    assert found.is_plain(b"POST / HTTP/1.1\r\nHost: localhost:8000\r\nAccept: */*\r\n\r\n")
    assert found.is_plain(b"POST / HTTP/1.1\r\nhost: 127.0.0.1:8000\r\n\r\n")
    assert not found.is_plain(b"POST / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
    assert not found.is_plain(b"POST / HTTP/1.1\r\nHost: localhost\r\norigin: http://a\r\n\r\n")
    assert not found.is_plain(b"POST / HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site\r\n\r\n")
