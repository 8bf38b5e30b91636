"""Restricted APIs: what the setting means, and who gets through."""

import pytest

from qinfer.errors import Restricted, SettingsError
from qinfer_api.auth import GROUPS, Restrictions


def headers(**values: str):  # type: ignore[no-untyped-def]  # a bound method of a dict
    return {name.replace("_", "-"): value for name, value in values.items()}.get


def test_a_group_without_an_entry_is_open() -> None:
    """And so are all of them by default."""
    restrictions = Restrictions.for_http(["trace:X-Admin=secret"])

    restrictions.check("health", headers())
    assert [group for group in GROUPS if restrictions.covers(group)] == ["trace"]


@pytest.mark.parametrize("sent", [{}, {"x_admin": ""}, {"x_admin": "Secret"}, {"x_admin": "grüße"}])
def test_http_names_the_header(sent: dict[str, str]) -> None:
    """Triton's text (reference §1.2); a wrong value is as good as none."""
    restrictions = Restrictions.for_http(["trace,logging:X-Admin=secret"])

    for group in ("trace", "logging"):
        with pytest.raises(Restricted, match=r"^This API is restricted, expecting header 'x-admin'$"):
            restrictions.check(group, headers(**sent))


def test_grpc_has_its_own_key_and_words() -> None:
    """The metadata key begins with a prefix."""
    restrictions = Restrictions.for_grpc(["health:infra-key=infra-value"])

    restrictions.check("health", headers(triton_grpc_protocol_infra_key="infra-value"))
    with pytest.raises(
        Restricted, match=r"^This protocol is restricted, expecting header 'triton-grpc-protocol-infra-key'$"
    ):
        restrictions.check("health", headers(infra_key="infra-value"))


def test_values_may_have_any_characters() -> None:
    """An equals sign, a colon, and bytes that are not ASCII, which HTTP shows as Latin-1."""
    restrictions = Restrictions.for_http(["health:key=a=b:ü"])

    restrictions.check("health", headers(key="a=b:ü".encode().decode("latin-1")))


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (["inference"], "entry 1 must be written as group,group:name=value"),
        (["health:key=v", "trace:key="], "entry 2 must be written"),
        (["trace:=value"], "entry 1 must be written"),
        ([":key=value"], "entry 1 must be written"),
        (["trace,nothing:key=value"], "unknown group 'nothing'; groups are health, metadata, inference"),
        (["trace,trace:key=value"], "group 'trace' is restricted twice"),
        (["trace:key=value", "logging,trace:other=value"], "group 'trace' is restricted twice"),
    ],
)
def test_wrong_entries_are_refused(entries: list[str], problem: str) -> None:
    """With the variable and what to do; never with the secret."""
    with pytest.raises(SettingsError, match=f"^QINFER_HTTP__RESTRICTED: {problem}") as raised:
        Restrictions.for_http(entries)

    assert "value" not in raised.value.message.replace("name=value", "")
