"""`Prefer` headers as RFC 7240 writes them, and as nobody should."""

import pytest

from qinfer_api.rest.services import Preferences, read_preferences

ASYNC = Preferences(respond_async=True)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], Preferences()),
        (["respond-async"], ASYNC),
        (["Respond-Async , WAIT = 10"], Preferences(respond_async=True, wait_s=10)),
        (["respond-async", "wait=10"], Preferences(respond_async=True, wait_s=10)),
        (['wait="10"'], Preferences(wait_s=10)),
        (["wait=0"], Preferences(wait_s=0)),
        (["wait=1, wait=2"], Preferences(wait_s=1)),
        (["respond-async; foo=bar; baz"], ASYNC),
        (['respond-async=""'], ASYNC),
        (['a="x, wait=1", respond-async'], ASYNC),
        (['a; b="x, wait=1"; c, respond-async'], ASYNC),
        (['a="\\", wait=1, \\"", respond-async'], ASYNC),
        ([", ,, respond-async,"], ASYNC),
        (["\tfoo=bar\t,\trespond-async\t"], ASYNC),
    ],
)
def test_preferences(headers: list[str], expected: Preferences) -> None:
    """Several headers are one list; names have no case; the first of a name counts; what is quoted is one value."""
    assert read_preferences(headers) == expected


@pytest.mark.parametrize(
    "header",
    [
        "wait",
        "wait=-1",
        "wait=1.5",
        "wait=\u00b2",
        "wait=9999999999",
        "/respond-async",
        "respond-async foo",
        'a="unterminated, respond-async',
        "return=minimal; respond-async",
        "x" * 1000 + ", respond-async",
    ],
)
def test_what_is_unknown_or_malformed_is_ignored(header: str) -> None:
    """As the RFC asks; half of a malformed one is not taken for another."""
    assert read_preferences([header]) == Preferences()


@pytest.mark.parametrize("unit", ['"', '\\"', ",", 'a="', "a;", '="'])
def test_no_header_takes_long_to_read(unit: str) -> None:
    """Whatever a stranger sends: no pattern may try all ways to part it."""
    assert read_preferences([unit * 10_000]) == Preferences()
