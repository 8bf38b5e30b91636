"""The file of API keys: what is in it, how it is checked, how a key is made."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from qinfer.core.api_keys import Scope, add_key, check_exposure, hash_key, read_keys
from qinfer.core.settings import AuthSettings
from qinfer.errors import SettingsError

SECRET = "a-very-secret-key"


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
    ],
    ids=["key for hash", "unknown field", "bad tenant", "no tenant", "no scope", "bad scope", "bad rate", "bad number"],
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
        (entry(id="k2"), r"keys\[1\]\.sha256 is that of another entry"),
        (entry(id="k2", sha256="0" * 64, rate_per_s=5), r"keys\[1\] has other quotas than tenant 'acme' has before"),
    ],
    ids=["same id", "same key", "other quotas"],
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


def test_a_key_is_made_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    """In a file for its owner's eyes only."""
    file = tmp_path / "keys.json"

    made, key = add_key(file, "acme", (Scope.INFER,))

    assert read_keys(file) == (made,)
    assert made.sha256 == hash_key(key)
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]


def test_further_keys_of_a_tenant_get_its_quotas(tmp_path: Path) -> None:
    """To change a key without a gap, two are valid for a while."""
    file = write(tmp_path, entry(rate_per_s=5, max_in_flight=7))

    second, _ = add_key(file, "acme", (Scope.ADMIN,), "spare")
    other, _ = add_key(file, "other", (Scope.INFER,))

    assert (second.id, second.rate_per_s, second.max_in_flight) == ("spare", 5.0, 7)
    assert other.rate_per_s == 0
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
