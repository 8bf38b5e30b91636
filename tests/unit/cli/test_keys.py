"""`qinfer keys new`, and the key that the other commands present."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qinfer.cli.client import api_key
from qinfer.cli.console import API_KEY_VARIABLE
from qinfer.cli.load import Target
from qinfer.cli.main import app
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

    assert (code, stdout) == (2, "")
    assert "no key was made" in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("value", "key"), [("abc", "abc"), ("", None)])
def test_commands_present_the_key_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, key: str | None
) -> None:
    """An option would show it to every user of the machine."""
    monkeypatch.setenv(API_KEY_VARIABLE, value)

    assert api_key() == key


def test_the_load_generator_presents_it_too() -> None:
    """In every request; and it can make no header of its own."""
    request = Target.of("http://h:1", "m", 0, b"body", None, "abc").request

    assert b"\r\nAuthorization: Bearer abc\r\n" in request
    assert b"Authorization" not in Target.of("http://h:1", "m", 0, b"body", None).request
    with pytest.raises(InvalidRequest):
        Target.of("http://h:1", "m", 0, b"body", None, "abc\r\nX: y")
