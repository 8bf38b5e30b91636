"""The types of bodies: their examples are what they say they are, and docstrings describe their fields."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from scripts.reference_http import document

SCHEMAS: dict[str, Any] = document()["components"]["schemas"]


def references(part: object) -> Iterator[str]:
    """Yields what a part of the document refers to."""
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        for inner in part.values():
            yield from references(inner)
    elif isinstance(part, list):
        for inner in part:
            yield from references(inner)


@pytest.mark.parametrize("name", [name for name, schema in SCHEMAS.items() if "example" in schema])
def test_an_example_is_of_its_type(name: str) -> None:
    whole = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}

    assert not list(jsonschema.Draft7Validator(whole).iter_errors(SCHEMAS[name]["example"]))


def test_every_reference_leads_to_a_schema() -> None:
    found = {reference.removeprefix("#/components/schemas/") for reference in references(document())}

    assert found
    assert found <= SCHEMAS.keys()


def test_docstrings_are_told_apart() -> None:
    sections = re.compile(r"\n\n(Attributes|Example|Args|Returns|Raises):")

    assert not [name for name, schema in SCHEMAS.items() if sections.search(schema["description"])]
    assert SCHEMAS["NewJob"]["properties"]["id"]["description"].startswith("An id of your own")
