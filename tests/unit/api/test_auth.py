"""Who calls: keys, scopes and quotas, without HTTP."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.api_keys import ApiKey, Scope, add_key, hash_key
from qinfer.core.settings import AuthSettings
from qinfer.errors import Forbidden, QuotaExceeded, SettingsError, Unauthorized
from qinfer.testing import FakeClock
from qinfer_api.auth import Auth, CallerContext, load_auth, presented_key


def key(secret: str, *, id: str = "", **fields: Any) -> ApiKey:
    return ApiKey(id=id or f"id-{secret}", sha256=hash_key(secret), **{"tenant": "acme", **fields})


def test_a_known_key_tells_who_asks() -> None:
    """The key itself goes no further than here."""
    auth = Auth([key("one"), key("two", tenant="other")])

    context = auth.authorize(CallerContext(trace="00-1", key="two"), Scope.INFER)

    assert (context.tenant, context.trace, context.key) == ("other", "00-1", "")
    assert context.principal is not None
    assert context.principal.key_id == "id-two"


@pytest.mark.parametrize(
    ("presented", "message"),
    [
        ("", "this server asks for an API key; send it as 'Authorization: Bearer <key>' or 'X-API-Key: <key>'"),
        ("three", "the API key is not known; ask for another"),
        ("ONE", "the API key is not known; ask for another"),
        ("\udcff", "the API key is not known; ask for another"),
        (hash_key("one"), "the API key is not known; ask for another"),
    ],
    ids=["missing", "unknown", "other case", "not text", "the hash"],
)
def test_others_are_unauthorized(presented: str, message: str) -> None:
    """The text does not repeat what was presented."""
    with pytest.raises(Unauthorized) as caught:
        Auth([key("one")]).authorize(CallerContext(key=presented), Scope.INFER)

    assert caught.value.message == message


@pytest.mark.parametrize(
    ("scopes", "asked", "allowed"),
    [
        ((Scope.INFER,), Scope.INFER, True),
        ((Scope.INFER,), Scope.ADMIN, False),
        ((Scope.ADMIN,), Scope.INFER, True),
        ((Scope.ADMIN,), Scope.ADMIN, True),
    ],
)
def test_a_scope_is_asked_for(scopes: tuple[Scope, ...], asked: Scope, allowed: bool) -> None:  # noqa: FBT001
    """Admin may everything."""
    auth = Auth([key("one", scopes=scopes)])

    if allowed:
        assert auth.authorize(CallerContext(key="one"), asked).tenant == "acme"
    else:
        with pytest.raises(Forbidden, match=r"^key 'id-one' does not have the scope 'admin'; use one that has$"):
            auth.authorize(CallerContext(key="one"), asked)


def test_a_rate_is_a_bucket_of_tokens() -> None:
    """A burst at once, then as many as the rate refills; a tenant's keys share the bucket."""
    clock = FakeClock()
    quota: dict[str, Any] = {"rate_per_s": 2.0, "burst": 3}
    auth = Auth([key("one", **quota), key("two", **quota), key("free", tenant="other")], clock)

    for secret in ("one", "two", "one"):
        auth.authorize_inference(CallerContext(key=secret))
    with pytest.raises(QuotaExceeded, match="tenant 'acme' has used up its rate of 2 requests a second") as caught:
        auth.authorize_inference(CallerContext(key="two"))
    auth.authorize_inference(CallerContext(key="free"))
    clock.advance(0.5)
    auth.authorize_inference(CallerContext(key="two"))
    clock.advance(3600.0)
    for _ in range(3):
        auth.authorize_inference(CallerContext(key="two"))

    assert caught.value.retry_after_s == 0.5
    with pytest.raises(QuotaExceeded):
        auth.authorize_inference(CallerContext(key="two"))


def test_so_many_may_be_in_flight() -> None:
    """Counted by whoever keeps the requests."""
    auth = Auth([key("one", max_in_flight=2)])
    principal = auth.authorize_inference(CallerContext(key="one")).principal
    assert principal is not None
    principal.quota.in_flight = 2

    with pytest.raises(QuotaExceeded, match="tenant 'acme' has 2 requests in flight, the most that it may have"):
        auth.authorize_inference(CallerContext(key="one"))

    principal.quota.in_flight = 1
    auth.authorize_inference(CallerContext(key="one"))


@pytest.mark.parametrize(
    ("authorization", "api_key", "presented"),
    [
        (None, None, ""),
        ("Bearer abc", None, "abc"),
        ("bearer   abc ", None, "abc"),
        (None, "abc", "abc"),
        ("Bearer abc", "other", "abc"),
        ("Basic abc", None, ""),
        ("Basic abc", "key", "key"),
        ("Bearer", None, ""),
    ],
)
def test_presented_key(authorization: str | None, api_key: str | None, presented: str) -> None:
    """A bearer token, or else the header of its own; other schemes are a proxy's business."""
    assert presented_key(authorization, api_key) == presented


def test_the_mode_decides(tmp_path: Path) -> None:
    """No keys, no check; keys without a file are no setting."""
    add_key(tmp_path / "keys.json", "acme", (Scope.INFER,))

    assert load_auth(AuthSettings(), "127.0.0.1") is None
    assert load_auth(AuthSettings(mode="none"), "0.0.0.0") is None
    assert load_auth(AuthSettings(mode="keys", keys_file=str(tmp_path / "keys.json")), "0.0.0.0") is not None
    with pytest.raises(SettingsError, match="QINFER_AUTH__KEYS_FILE is not set"):
        load_auth(AuthSettings(mode="keys"), "127.0.0.1")


def test_half_of_the_burst_is_kept_for_callers() -> None:
    """From what the server does for a tenant, which is charged to the same bucket; a burst of 1 is not halved."""
    clock = FakeClock()
    auth = Auth([key("one", rate_per_s=2.0, burst=5), key("single", tenant="single", rate_per_s=0.5)], clock)

    assert (auth.spare("acme"), auth.spare("single")) == (3.0, 1.0)
    for _ in range(3):
        auth.charge_tenant("acme")
    assert auth.spare("acme") == 0.0
    for _ in range(2):
        auth.authorize_inference(CallerContext(key="one"))
    with pytest.raises(QuotaExceeded, match="tenant 'acme' has used up its rate"):
        auth.charge_tenant("acme")
    assert auth.spare("acme") == 0.0
    clock.advance(1.5)
    assert auth.spare("acme") == 1.0
    auth.give_back("acme")
    assert auth.spare("acme") == 2.0
    clock.advance(3600.0)
    auth.give_back("acme")
    assert auth.spare("acme") == 3.0


def test_without_a_rate_there_is_room_for_all() -> None:
    """A tenant whose keys have none, and one that has no keys any more."""
    auth = Auth([key("free", tenant="free")])

    for tenant in ("free", "gone", ""):
        auth.charge_tenant(tenant)
        auth.give_back(tenant)
        assert auth.spare(tenant) == math.inf


ENDS = datetime(2030, 1, 1, tzinfo=UTC)


def test_a_key_is_valid_until_it_expires() -> None:
    """A caller who was authorized before is refused then, too."""
    now_s = ENDS.timestamp() - 0.001
    auth = Auth([key("one", expires_at=ENDS)], epoch_s=lambda: now_s)
    before = auth.authorize(CallerContext(key="one"), Scope.INFER)
    auth.recheck(before)
    assert auth.has_key("acme")

    now_s = ENDS.timestamp()

    for refused in (
        lambda: auth.authorize(CallerContext(key="one"), Scope.INFER),
        lambda: auth.recheck(before),
        lambda: auth.authorize_inference(before),
    ):
        with pytest.raises(Unauthorized, match=r"^key 'id-one' has expired; use another$"):
            refused()
    assert not auth.has_key("acme")


def test_a_revoked_key_is_refused_where_it_was_authorized_before() -> None:
    auth = Auth([key("one"), key("two")])
    one = auth.authorize(CallerContext(key="one"), Scope.INFER)
    two = auth.authorize(CallerContext(key="two"), Scope.INFER)

    auth.replace_keys([key("two"), key("three", tenant="other")])

    auth.recheck(two)
    assert auth.authorize(CallerContext(key="three"), Scope.INFER).tenant == "other"
    with pytest.raises(Unauthorized, match="the API key is not known"):
        auth.authorize(CallerContext(key="one"), Scope.INFER)
    for refused in (auth.recheck, auth.authorize_inference):
        with pytest.raises(Unauthorized, match=r"^key 'id-one' was revoked; use another$"):
            refused(one)


def test_a_key_that_loses_a_scope_or_its_tenant_is_refused() -> None:
    """Where it was authorized for that."""
    auth = Auth([key("one", scopes=(Scope.ADMIN,))])
    asked = auth.authorize(CallerContext(key="one"), Scope.INFER)
    loading = auth.authorize(CallerContext(key="one"), Scope.ADMIN)

    auth.replace_keys([key("one")])
    auth.recheck(asked)
    with pytest.raises(Forbidden, match="does not have the scope 'admin'"):
        auth.recheck(loading)

    auth.replace_keys([key("one", tenant="other")])
    with pytest.raises(Unauthorized, match="was revoked"):
        auth.recheck(asked)


def test_a_tenant_keeps_what_it_has_used_when_keys_change() -> None:
    """Else a new key would be a new burst; new quotas hold at once."""
    clock = FakeClock()
    auth = Auth([key("one", rate_per_s=1.0, burst=3)], clock)
    for _ in range(3):
        auth.authorize_inference(CallerContext(key="one"))
    principal = auth.authorize(CallerContext(key="one"), Scope.INFER).principal
    assert principal is not None
    principal.quota.in_flight = 2

    auth.replace_keys([key("two", rate_per_s=2.0, burst=4, max_in_flight=2)])

    with pytest.raises(QuotaExceeded, match="2 requests in flight"):
        auth.authorize_inference(CallerContext(key="two"))
    principal.quota.in_flight = 0
    with pytest.raises(QuotaExceeded, match="its rate of 2 requests a second"):
        auth.authorize_inference(CallerContext(key="two"))
    clock.advance(100.0)
    for _ in range(4):
        auth.authorize_inference(CallerContext(key="two"))
    with pytest.raises(QuotaExceeded):
        auth.authorize_inference(CallerContext(key="two"))


def test_a_caller_without_a_key_is_not_rechecked() -> None:
    """Health needs none."""
    Auth([key("one")]).recheck(CallerContext())


def test_a_tenant_without_a_key_is_a_tenant_until_the_end() -> None:
    """Where only one is left, it may do what tenants keep from one another."""
    auth = Auth([key("one"), key("two", tenant="other")])

    auth.replace_keys([key("one")])

    assert auth.tenants == {"acme", "other"}
