"""Which headers become parameters."""

import pytest

from qinfer.errors import SettingsError
from qinfer_api.http.infer import compile_forward, forwarded

HEADERS = [(b"X-Tenant", b"a"), (b"x-tenant-id", b"b\xe9"), (b"host", b"c"), (b"x-tenant", b"d"), (b"X-Tenant", b"e")]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("x-tenant", {"X-Tenant": "e", "x-tenant": "d"}),
        ("X-TENANT.*", {"X-Tenant": "e", "x-tenant": "d", "x-tenant-id": "bé"}),
        ("(?-i)x-.*", {"x-tenant": "d", "x-tenant-id": "bé"}),
        ("tenant", {}),
    ],
)
def test_whole_names_match(pattern: str, found: dict[str, str]) -> None:
    """Their case does not count unless the pattern says so; names stay as they were sent; the last value counts."""
    compiled = compile_forward("V", pattern)

    assert compiled is not None
    assert forwarded(compiled, HEADERS) == found


def test_no_pattern_forwards_nothing() -> None:
    """So that nobody needs to look at headers."""
    assert compile_forward("V", "") is None


def test_a_bad_pattern_is_refused_at_the_start() -> None:
    """With the variable and the value."""
    with pytest.raises(SettingsError, match=r"QINFER_X=\(: .*regular expression"):
        compile_forward("QINFER_X", "(")
