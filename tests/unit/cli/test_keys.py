"""`qinfer keys`, and the key that the other commands present."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qinfer.cli.client import api_key
from qinfer.cli.load import LoadTarget
from qinfer.cli.main import app
from qinfer.client.connection import API_KEY_VARIABLE
from qinfer.core.api_keys import Scope, hash_key, read_keys
from qinfer.errors import InvalidRequest


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["keys", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_key_is_printed_once_and_its_hash_kept(tmp_path: Path) -> None:
    """The key alone goes to stdout, so that it can be piped."""
    file = tmp_path / "keys.json"

    code, stdout, stderr = run("new", "--tenant", "acme", "--file", str(file))

    (entry,) = read_keys(file)
    key = stdout.strip()
    assert code == 0
    assert (entry.tenant, entry.scopes, entry.sha256) == ("acme", (Scope.INFER,), hash_key(key))
    assert "This is the only time it is shown" in stderr
    assert key not in stderr


def test_scopes_and_name_can_be_chosen(tmp_path: Path) -> None:
    """As JSON for scripts."""
    file = tmp_path / "keys.json"

    code, stdout, _ = run(
        "new", "-t", "ops", "-s", "admin", "-s", "infer", "-s", "admin", "--id", "main", "-f", str(file), "--json"
    )

    told = json.loads(stdout)
    assert code == 0
    assert (told["id"], told["tenant"], told["scopes"]) == ("main", "ops", ["admin", "infer"])
    assert read_keys(file)[0].sha256 == hash_key(told["key"])


def test_a_bad_name_is_wrong_usage(tmp_path: Path) -> None:
    """And makes no file."""
    code, stdout, stderr = run("new", "--tenant", "a b", "--file", str(tmp_path / "keys.json"))

    assert (code, stdout) == (64, "")
    assert "no key was made" in stderr
    assert list(tmp_path.iterdir()) == []


def new(file: Path, *more: str) -> dict[str, str]:
    code, stdout, _ = run("new", "--tenant", "acme", "--file", str(file), "--json", *more)
    assert code == 0
    told: dict[str, str] = json.loads(stdout)
    return told


def listed(file: Path) -> list[dict[str, str]]:
    code, stdout, _ = run("list", "--file", str(file), "--json")
    assert code == 0
    rows: list[dict[str, str]] = json.loads(stdout)
    return rows


def test_keys_are_listed_without_their_hashes(tmp_path: Path) -> None:
    """For people as a table, for scripts as JSON."""
    file = tmp_path / "keys.json"
    first = new(file, "--id", "first", "--expires", "90d")
    new(file, "--id", "second", "--scope", "admin")

    code, table, _ = run("list", "-f", str(file))
    rows = listed(file)

    assert code == 0
    assert "first" in table
    assert "valid" in table
    assert [row["id"] for row in rows] == ["first", "second"]
    assert [row["scopes"] for row in rows] == ["infer", "admin"]
    assert rows[0]["expires"].startswith(first["expires_at"][:19])
    assert rows[1]["expires"] == ""
    assert hash_key(first["key"]) not in table + json.dumps(rows)


def test_an_expired_key_is_listed_as_such(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    new(file, "--expires", "0s")

    assert [row["state"] for row in listed(file)] == ["expired"]


def test_a_revoked_key_is_not_listed(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    new(file, "--id", "first")
    new(file, "--id", "second")

    code, stdout, _ = run("revoke", "first", "--file", str(file))
    again, _, stderr = run("revoke", "first", "--file", str(file))

    assert code == 0
    assert "'first' of tenant 'acme' was removed" in stdout
    assert [row["id"] for row in listed(file)] == ["second"]
    assert again == 64
    assert "has no key 'first'" in stderr


def test_a_rotated_key_has_a_successor(tmp_path: Path) -> None:
    """Which is printed once, and valid at once."""
    file = tmp_path / "keys.json"
    new(file, "--id", "first")

    code, stdout, stderr = run("rotate", "first", "--overlap", "1h", "--file", str(file))

    first, second = listed(file)
    assert code == 0
    assert read_keys(file)[1].sha256 == hash_key(stdout.strip())
    assert first["expires"]
    assert (second["expires"], second["state"]) == ("", "valid")
    assert "'first' expires in 1h" in stderr


@pytest.mark.parametrize("duration", ["", "1", "h", "1w", "-1h", "1.5h", "1000000000d", "90 d"])
def test_a_duration_has_a_number_and_a_unit(tmp_path: Path, duration: str) -> None:
    file = tmp_path / "keys.json"
    new(file, "--id", "first")

    code, _, stderr = run("rotate", "first", "--overlap", duration, "--file", str(file))

    assert code == 64
    assert "is not a duration" in stderr
    assert len(read_keys(file)) == 1


@pytest.mark.parametrize(("value", "key"), [("abc", "abc"), ("", None)])
def test_commands_present_the_key_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, key: str | None
) -> None:
    """An option would show it to every user of the machine."""
    monkeypatch.setenv(API_KEY_VARIABLE, value)

    assert api_key() == key


def test_the_load_generator_presents_it_too() -> None:
    """In every request; and it can make no header of its own."""
    request = LoadTarget.for_url("http://h:1", "/", b"body", None, "abc").request

    assert b"\r\nAuthorization: Bearer abc\r\n" in request
    assert b"Authorization" not in LoadTarget.for_url("http://h:1", "/", b"body", None).request
    with pytest.raises(InvalidRequest):
        LoadTarget.for_url("http://h:1", "/", b"body", None, "abc\r\nX: y")
