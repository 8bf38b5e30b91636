"""The file of API keys: what is in it, how it is checked, how a key is made."""

import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.api_keys import Scope, add_key, check_exposure, hash_key, read_keys, revoke_key, rotate_key
from qinfer.core.settings import AuthSettings
from qinfer.errors import SettingsError

SECRET = "a-very-secret-key-of-forty-three-characters"


def entry(**changes: Any) -> dict[str, Any]:
    return {"id": "k1", "sha256": hash_key(SECRET), "tenant": "acme", **changes}


def write(path: Path, *entries: Any, **more: Any) -> Path:
    file = path / "keys.json"
    file.write_text(json.dumps({"keys": list(entries), **more}))
    return file


def test_a_file_is_read(tmp_path: Path) -> None:
    """What is left out has a default: infer, without quotas."""
    file = write(tmp_path, entry(), entry(id="k2", sha256="0" * 64, tenant="b", scopes=["infer", "admin"], burst=3))

    first, second = read_keys(file)

    assert (first.tenant, first.scopes, first.rate_per_s, first.burst, first.max_in_flight) == (
        "acme",
        (Scope.INFER,),
        0.0,
        0,
        0,
    )
    assert (second.scopes, second.burst) == ((Scope.INFER, Scope.ADMIN), 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sha256": SECRET}, r"\$\.keys\[0\]\.sha256"),
        ({"key": SECRET}, "unknown field `key`"),
        ({"tenant": "a@b"}, r"\$\.keys\[0\]\.tenant"),
        ({"tenant": ""}, r"\$\.keys\[0\]\.tenant"),
        ({"scopes": []}, r"\$\.keys\[0\]\.scopes"),
        ({"scopes": ["root"]}, r"\$\.keys\[0\]\.scopes\[0\]"),
        ({"rate_per_s": -1}, r"\$\.keys\[0\]\.rate_per_s"),
        ({"max_in_flight": "many"}, r"\$\.keys\[0\]\.max_in_flight"),
        ({"burst": 10**400}, r"\$\.keys\[0\]\.burst|out of range"),
        ({"expires_at": "2026-11-23T10:00:00"}, r"\$\.keys\[0\]\.expires_at"),
        ({"scopes": [SECRET]}, r"\$\.keys\[0\]\.scopes\[0\]"),
        ({SECRET: "acme"}, r"unknown field … - at `\$\.keys\[0\]`"),
    ],
    ids=[
        "key for hash",
        "unknown field",
        "bad tenant",
        "no tenant",
        "no scope",
        "bad scope",
        "bad rate",
        "bad number",
        "too large a number",
        "no offset from UTC",
        "key for scope",
        "key for field",
    ],
)
def test_what_is_wrong_is_named_and_never_shown(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """Somebody may have written a key where its hash belongs."""
    with pytest.raises(SettingsError, match=message) as caught:
        read_keys(write(tmp_path, entry(**changes)))

    assert SECRET not in caught.value.message


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (entry(sha256="0" * 64), r"keys\[1\]\.id 'k1' is taken"),
        (entry(id="k2"), r"keys\[1\]\.sha256 is the same as in another entry"),
        (entry(id="k2", sha256="0" * 64, rate_per_s=5), r"keys\[1\] has other quotas than tenant 'acme' has before"),
        (entry(id="k2", sha256="0" * 64, weight=2), r"max_in_flight and weight$"),
    ],
    ids=["same id", "same key", "other quotas", "other weight"],
)
def test_entries_must_agree(tmp_path: Path, second: dict[str, Any], message: str) -> None:
    """An id and a key are one entry's; a quota is the tenant's."""
    with pytest.raises(SettingsError, match=message):
        read_keys(write(tmp_path, entry(), second))


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Missing, no JSON, or with something beside the keys."""
    (tmp_path / "text").write_text("hello")

    with pytest.raises(SettingsError, match="can't be read: No such file"):
        read_keys(tmp_path / "missing")
    with pytest.raises(SettingsError, match="malformed"):
        read_keys(tmp_path / "text")
    with pytest.raises(SettingsError, match="unknown field `users`"):
        read_keys(write(tmp_path, users=[]))


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("\n", "is empty"), ("{}", "has no keys"), ('{"keys": []}', "has no keys")],
)
def test_a_file_without_keys_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(content)

    with pytest.raises(SettingsError, match=f"{file} {message}; `qinfer keys new`"):
        read_keys(file)


def test_the_first_key_may_go_into_a_file_without_any(tmp_path: Path) -> None:
    file = write(tmp_path)

    made, _ = add_key(file, "acme", (Scope.INFER,))

    assert read_keys(file) == (made,)


def test_a_key_is_made_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    """In a file for its owner's eyes only."""
    file = tmp_path / "keys.json"

    made, key = add_key(file, "acme", (Scope.INFER,))

    assert read_keys(file) == (made,)
    assert made.sha256 == hash_key(key)
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_a_key_that_is_made_says_when_and_until_when(tmp_path: Path) -> None:
    until = datetime(2050, 1, 1, tzinfo=UTC)
    before = datetime.now(UTC)

    add_key(tmp_path / "keys.json", "acme", (Scope.INFER,), expires_at=until)

    (key,) = read_keys(tmp_path / "keys.json")
    assert key.created_at is not None
    assert abs(key.created_at - before) < timedelta(minutes=5)
    assert key.expires_at == until
    assert not key.is_expired(until - timedelta(seconds=1))
    assert key.is_expired(until)


def test_a_revoked_key_is_not_in_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, entry(), entry(id="k2", sha256="0" * 64))

    assert revoke_key(file, "k1").id == "k1"

    assert [key.id for key in read_keys(file)] == ["k2"]
    with pytest.raises(SettingsError, match=r"has no key 'k1'; `qinfer keys list`"):
        revoke_key(file, "k1")
    with pytest.raises(SettingsError, match="'k2' is the only key"):
        revoke_key(file, "k2")
    assert [key.id for key in read_keys(file)] == ["k2"]


def test_both_keys_of_a_rotation_are_valid_for_the_overlap(tmp_path: Path) -> None:
    """The new one has the rights of the old one."""
    file = write(tmp_path, entry(scopes=["admin"], rate_per_s=5), entry(id="k2", sha256="0" * 64, tenant="b"))
    before = datetime.now(UTC).replace(microsecond=0)

    made, key = rotate_key(file, "k1", timedelta(hours=1))

    old, other, new = read_keys(file)
    assert (new, new.sha256) == (made, hash_key(key))
    assert (new.tenant, new.scopes, new.rate_per_s, new.expires_at) == ("acme", (Scope.ADMIN,), 5.0, None)
    assert new.id != old.id
    assert (old.id, old.sha256) == ("k1", hash_key(SECRET))
    assert old.expires_at is not None
    assert before + timedelta(hours=1) <= old.expires_at <= datetime.now(UTC) + timedelta(hours=1)
    assert other.expires_at is None


def test_a_rotation_prolongs_no_key_and_gives_the_new_one_as_long(tmp_path: Path) -> None:
    ends = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=1)
    dates = {"created_at": (ends - timedelta(days=90)).isoformat(), "expires_at": ends.isoformat()}
    file = write(tmp_path, entry(**dates))

    made, _ = rotate_key(file, "k1", timedelta(hours=1))
    short, _ = rotate_key(file, "k1", timedelta(hours=1), timedelta(days=1))

    assert read_keys(file)[0].expires_at == ends
    assert made.created_at is not None
    assert made.expires_at == made.created_at + timedelta(days=90)
    assert short.created_at is not None
    assert short.expires_at == short.created_at + timedelta(days=1)


def test_a_rotation_does_not_guess_how_long_a_key_was_made_for(tmp_path: Path) -> None:
    file = write(tmp_path, entry(expires_at="2050-01-01T00:00:00Z"))

    with pytest.raises(SettingsError, match="does not tell its lifetime"):
        rotate_key(file, "k1", timedelta(hours=1))

    assert len(read_keys(file)) == 1


def test_a_file_that_others_may_read_stays_so(tmp_path: Path) -> None:
    """A gateway runs as another user; and a link stays a link."""
    file = write(tmp_path, entry(), entry(id="k2", sha256="0" * 64))
    file.chmod(0o644)
    link = tmp_path / "link.json"
    link.symlink_to(file)

    revoke_key(link, "k1")

    assert file.stat().st_mode & 0o777 == 0o644
    assert link.is_symlink()
    assert len(read_keys(file)) == 1


def test_further_keys_of_a_tenant_get_its_quotas(tmp_path: Path) -> None:
    """To change a key without a gap, two are valid for a while."""
    file = write(tmp_path, entry(rate_per_s=5, max_in_flight=7, weight=3))

    second, _ = add_key(file, "acme", (Scope.ADMIN,), "spare")
    other, _ = add_key(file, "other", (Scope.INFER,))

    assert (second.id, second.rate_per_s, second.max_in_flight, second.weight) == ("spare", 5.0, 7, 3)
    assert (other.rate_per_s, other.weight) == (0, 1)
    assert len(read_keys(file)) == 3


@pytest.mark.parametrize(("tenant", "key_id"), [("a b", ""), ("", ""), ("acme", "k1"), ("acme", "k/1")])
def test_a_key_with_a_bad_name_is_not_made(tmp_path: Path, tenant: str, key_id: str) -> None:
    """The file stays as it was."""
    file = write(tmp_path, entry())
    before = file.read_bytes()

    with pytest.raises(SettingsError):
        add_key(file, tenant, (Scope.INFER,), key_id)

    assert file.read_bytes() == before


def test_keys_made_at_once_are_all_kept(tmp_path: Path) -> None:
    """Writers wait for one another."""
    file = tmp_path / "keys.json"
    writers = [threading.Thread(target=add_key, args=(file, f"t{n}", (Scope.INFER,))) for n in range(8)]

    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert {key.tenant for key in read_keys(file)} == {f"t{n}" for n in range(8)}


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """It is not made."""
    with pytest.raises(SettingsError, match="its directory can't be opened"):
        add_key(tmp_path / "no" / "keys.json", "acme", (Scope.INFER,))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_everyone_may_call(host: str) -> None:
    """There are only this machine's users."""
    check_exposure(AuthSettings(), host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "gateway.example.org"])
def test_elsewhere_somebody_must_have_said_so(host: str) -> None:
    """The message has both remedies."""
    with pytest.raises(SettingsError, match=r"QINFER_AUTH__MODE=keys .* QINFER_AUTH__MODE=none"):
        check_exposure(AuthSettings(), host)

    check_exposure(AuthSettings(mode="none"), host)
    check_exposure(AuthSettings(mode="keys"), host)


def test_a_key_file_without_a_mode_is_no_open_server() -> None:
    """The file alone would require no key, even on loopback."""
    with pytest.raises(SettingsError, match=r"QINFER_AUTH__MODE=keys .* QINFER_AUTH__MODE=none"):
        check_exposure(AuthSettings(keys_file="keys.json"), "127.0.0.1")

    check_exposure(AuthSettings(mode="none", keys_file="keys.json"), "127.0.0.1")
    check_exposure(AuthSettings(mode="keys", keys_file="keys.json"), "127.0.0.1")
