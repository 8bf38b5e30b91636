"""Settings of CORS: origins as browsers write them, and what is refused with its remedy."""

import pytest

from qinfer.core.settings import load_settings
from qinfer.core.settings_sections import CorsSettings, origin_of
from qinfer.errors import SettingsError

VARIABLE = "QINFER_CORS__ALLOW_ORIGINS"


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://app.example.org", "https://app.example.org"),
        ("HTTPS://App.Example.org:443", "https://app.example.org"),
        ("http://localhost:3000", "http://localhost:3000"),
        ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)
def test_origins_are_as_browsers_send_them(text: str, origin: str) -> None:
    assert origin_of(text) == origin


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "app.example.org",
        "https://",
        "https://a/",
        "https://a/b",
        "https://u@a",
        "https://a:99999",
        "https://*",
    ],
)
def test_what_is_no_origin_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, f'["{text}"]')

    with pytest.raises(SettingsError, match=rf"{VARIABLE}: '.*' is no origin; write scheme://host"):
        load_settings()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ALLOW_ORIGINS": '["*", "https://a"]'}, "stands alone"),
        ({"ALLOW_ORIGINS": '["*"]', "ALLOW_CREDENTIALS": "true"}, "QINFER_CORS__ALLOW_CREDENTIALS is not possible"),
        ({"ALLOW_METHODS": '["*"]'}, r"'\*' is no name of a method or header"),
        ({"ALLOW_HEADERS": '["x\\r\\ny"]'}, "is no name"),
        ({"EXPOSE_HEADERS": '["a b"]'}, "is no name"),
        ({"MAX_AGE_S": "-1"}, "at least 0"),
    ],
)
def test_what_can_not_be_is_refused(monkeypatch: pytest.MonkeyPatch, values: dict[str, str], message: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"QINFER_CORS__{name}", value)

    with pytest.raises(SettingsError, match=message):
        load_settings()


def test_cors_is_off_by_default() -> None:
    assert CorsSettings().allow_origins == ()
