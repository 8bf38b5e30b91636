"""Messages about wrong values have the words of the field, not those of pydantic."""

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from qinfer.core.settings import load_settings, variable_names
from qinfer.core.wrong_values import explain
from qinfer.errors import SettingsError

THEIRS = ("Input", "Value error", "valid ", "Field required", "parse string")


class Sample(BaseModel):
    whole: Annotated[int, Field(ge=0, le=65535)] = 0
    number: Annotated[float, Field(gt=0)] = 1.0
    flag: bool = False
    text: Annotated[str, Field(min_length=1)] = "a"
    names: Annotated[tuple[str, ...], Field(min_length=1)] = ("a",)
    table: dict[str, int] = {}
    choice: Literal["json", "text"] = "json"

    @field_validator("text")
    @classmethod
    def _no_b(cls, value: str) -> str:
        if value == "b":
            raise ValueError("b is taken")
        return value


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("whole", "x", "expected a whole number"),
        ("whole", 1.5, "expected a whole number"),
        ("whole", -1, "expected at least 0"),
        ("whole", 65536, "expected at most 65535"),
        ("number", 0, "expected more than 0"),
        ("number", "x", "expected a number"),
        ("flag", "perhaps", "expected true or false"),
        ("text", "", "expected at least 1 character"),
        ("text", "b", "b is taken"),
        ("text", 1, "expected a text"),
        ("names", "a", "expected a list"),
        ("names", (), "expected at least 1 entry"),
        ("table", [1], "expected a mapping of names to values"),
        ("choice", "xml", "expected 'json' or 'text'"),
    ],
)
def test_a_wrong_value_is_explained(field: str, value: object, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Sample.model_validate({field: value})

    assert [explain(each) for each in caught.value.errors()] == [said]


@pytest.mark.parametrize("value", ["-1e999", "[1]", "{}", '{"a": 1}'])
def test_no_setting_speaks_like_pydantic(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting that refuses the value."""
    for name in variable_names():
        monkeypatch.delenv(name, raising=False)
    said = []
    for name in variable_names():
        with monkeypatch.context() as one:
            one.setenv(name, value)
            try:
                load_settings()
            except SettingsError as error:
                said.append(error.message)

    assert len(said) > 20
    assert [message for message in said if any(theirs in message for theirs in THEIRS)] == []


def test_directories_may_be_allowed_as_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `--allow-store` takes them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QINFER_STORES__ALLOW", '["./data", "/srv/in/", "s3://bucket/folder/"]')

    assert load_settings().stores.allow == (f"file://{tmp_path}/data", "file:///srv/in", "s3://bucket/folder")


@pytest.mark.parametrize("place", ["", "data", "s3:bucket"])
def test_what_may_be_a_mistyped_url_is_no_directory(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QINFER_STORES__ALLOW", json.dumps([place]))

    with pytest.raises(SettingsError, match="is no URL of a store"):
        load_settings()
