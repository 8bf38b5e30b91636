"""Settings: every variable of the environment is understood, or refused by name."""

import pytest

from qinfer.cli.console import API_KEY_VARIABLE
from qinfer.core.settings import Settings, load_settings, unknown_variables, variable_names
from qinfer.errors import SettingsError


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


def test_unknown_variable_keeps_its_value_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The misspelt variable may hold a password."""
    monkeypatch.setenv("QINFER_REDIS__ULR", "redis://:hunter2@queue")

    with pytest.raises(SettingsError) as caught:
        load_settings()

    assert "hunter2" not in caught.value.message
    assert "QINFER_REDIS__URL" in caught.value.message


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
