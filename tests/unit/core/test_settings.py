"""Settings: every variable of the environment is understood, or refused by name."""

import pytest
from pydantic import ValidationError

from qinfer.client.connection import API_KEY_VARIABLE
from qinfer.core.settings import Settings, load_settings, unknown_variables, variable_names
from qinfer.core.settings_sections import SegmentSettings
from qinfer.core.store_urls import UrlGrant
from qinfer.errors import Forbidden, SettingsError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variable_names():
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_valid() -> None:
    """An empty environment gives a working configuration."""
    assert load_settings() == Settings()


def test_nested_variable_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections are nested by two underscores."""
    monkeypatch.setenv("QINFER_HTTP__PORT", "8123")

    assert load_settings().http.port == 8123


def test_whole_section_may_be_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """A section given as one JSON object is known too."""
    monkeypatch.setenv("QINFER_HTTP", '{"port": 8124}')

    assert load_settings().http.port == 8124


def test_unknown_variable_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable would otherwise leave the default in place without a word."""
    monkeypatch.setenv("QINFER_HTPP__PORT", "8123")

    with pytest.raises(SettingsError, match=r"unknown setting QINFER_HTPP__PORT; did you mean QINFER_HTTP__PORT\?"):
        load_settings()


@pytest.mark.parametrize("name", ["QINFER_NEWER__THING", "QINFER_HTTP__NEWER", "QINFER_NEWER"])
def test_unknown_variable_is_left_out_where_settings_are_not_strict(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A rollback meets the settings of a newer version."""
    monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("QINFER_STRICT_SETTINGS", "false")
    monkeypatch.setenv("QINFER_HTTP__PORT", "8123")

    settings = load_settings()

    assert settings.http.port == 8123
    assert [problem.partition(";")[0] for problem in settings.unknown] == [f"unknown setting {name}"]


def test_unknown_variable_keeps_its_value_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The misspelt variable may hold a password."""
    monkeypatch.setenv("QINFER_REDIS__ULR", "redis://:hunter2@queue")

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert "hunter2" not in caught.value.message
    assert "QINFER_REDIS__URL" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("QINFER_REDIS", '{"ulr": "redis://:hunter2@queue"}'),
        ("QINFER_WEBHOOKS", '{"secret": ["hunter2"]}'),
        ("QINFER_LABELING", '"hunter2"'),
        ("QINFER_HTTP__RESTRICTED", '{"health": "hunter2"}'),
        ("QINFER_HTTP__RESTRICTED", '[["hunter2"]]'),
        ("QINFER_STORES__ALLOW", '["s3://user:hunter2@bucket"]'),
        ("QINFER_PASS_ENV", "hunter2"),
    ],
)
def test_wrong_value_that_may_be_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """A section, a list and an unknown field may contain a password; the message names the variable."""
    monkeypatch.setenv(name, value)

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert "hunter2" not in caught.value.message
    assert name in caught.value.message or name.removeprefix("QINFER_").lower() in caught.value.message


def test_every_unknown_variable_is_named() -> None:
    """One start shows all mistakes; other programs' variables are none of ours."""
    problems = unknown_variables(["QINFER_A", "PATH", "qinfer_http__port", "QINFER_B__C"])

    assert [p.partition(";")[0] for p in problems] == ["unknown setting QINFER_A", "unknown setting QINFER_B__C"]


def test_wrong_value_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the variable, what it accepts, and the value."""
    monkeypatch.setenv("QINFER_HTTP__PORT", "99999")

    with pytest.raises(SettingsError, match=r"QINFER_HTTP__PORT: .*65535.*99999"):
        load_settings()


def test_list_that_is_not_json_says_how_to_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Globs given as a bare word are refused with the remedy, not with a traceback."""
    monkeypatch.setenv("QINFER_WORKER__MODELS", "digits")

    with pytest.raises(SettingsError, match="written as JSON"):
        load_settings()


def test_the_key_of_the_command_line_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be there where a server is started, and means nothing to it."""
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")

    assert load_settings() == Settings()


@pytest.mark.parametrize(
    ("payload_url", "is_refused"),
    [
        ("s3://bucket/data/tensors", True),
        ("s3://bucket/data", True),
        ("s3a://bucket", True),
        ("s3://bucket/database", False),
        ("s3://bucket/tensors", False),
        ("simplecache::s3://bucket/data", True),
    ],
)
def test_jobs_may_not_use_the_payload_store(
    monkeypatch: pytest.MonkeyPatch,
    payload_url: str,
    is_refused: bool,  # noqa: FBT001
) -> None:
    """It has the tensors of all tenants."""
    monkeypatch.setenv("QINFER_STORES__ALLOW", '["gs://other", "s3://bucket/data"]')
    monkeypatch.setenv("QINFER_LIMITS__PAYLOAD_URL", payload_url)

    if is_refused:
        with pytest.raises(SettingsError, match=r"QINFER_LIMITS__PAYLOAD_URL.*QINFER_STORES__ALLOW"):
            load_settings()
    else:
        assert load_settings().limits.payload_url == payload_url


def test_a_payload_store_that_jobs_may_not_use_may_be_where_they_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the data directory of `qinfer up --allow-store .`."""
    monkeypatch.setenv("QINFER_STORES__ALLOW", '["/data"]')
    monkeypatch.setenv("QINFER_LIMITS__PAYLOAD_URL", "file:///data/.qinfer/payloads")
    monkeypatch.setenv("QINFER_STORES__DENY", '["/data/.qinfer/payloads/x"]')
    with pytest.raises(SettingsError, match=r"QINFER_STORES__DENY"):
        load_settings()
    monkeypatch.setenv("QINFER_STORES__DENY", '["/data/.qinfer/payloads"]')

    grant = load_settings().stores.grant_of("acme").narrowed(UrlGrant(("file:///data",), ("file:///data",)))

    assert grant.check_read("file:///data/.qinfer/payload") == "file:///data/.qinfer/payload"
    for check in (grant.check_read, grant.check_write):
        for name in ("payloads", "payloads/000/x"):
            with pytest.raises(Forbidden):
                check(f"file:///data/.qinfer/{name}")


def test_tenants_prefixes_are_written_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QINFER_STORES__TENANTS", '{"acme": {"read": ["s3a://bucket/in/"]}}')
    assert load_settings().stores.tenants["acme"].read == ("s3://bucket/in",)

    monkeypatch.setenv("QINFER_STORES__TENANTS", "acme=s3://bucket")
    with pytest.raises(SettingsError, match="QINFER_STORES__TENANTS: an object is written as JSON"):
        load_settings()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"listen_host": "10.0.0.7"}, "QINFER_SEGMENTS__LISTEN_HOST needs QINFER_SEGMENTS__DIRECTORY"),
        ({"listen_host": "0.0.0.0", "directory": "/run/qinfer"}, "set QINFER_SEGMENTS__ADVERTISE_HOST, too"),
        ({"tls_certfile": "own.pem"}, "QINFER_SEGMENTS__TLS_CERTFILE and QINFER_SEGMENTS__TLS_KEYFILE need each other"),
    ],
)
def test_where_tensors_are_read_is_whole(given: dict[str, str], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        SegmentSettings(**given)
