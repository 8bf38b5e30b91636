"""The types of bodies: their examples are what they say they are, and docstrings describe their fields."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from qinfer.core.settings_sections import CorsSettings
from scripts.reference_http import document

DOCUMENT = document()
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


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
    found = {reference.removeprefix("#/components/schemas/") for reference in references(DOCUMENT)}

    assert found
    assert found <= SCHEMAS.keys()


def test_docstrings_are_told_apart() -> None:
    sections = re.compile(r"\n\n(Attributes|Example|Args|Returns|Raises):")

    assert not [name for name, schema in SCHEMAS.items() if sections.search(schema["description"])]
    assert SCHEMAS["NewJob"]["properties"]["id"]["description"].startswith("An id of your own")


def test_pages_of_other_origins_may_use_the_whole_protocol() -> None:
    """By default: every method, every header of a request, and of a reply."""
    allowed = CorsSettings()
    operations = [(method, one) for methods in DOCUMENT["paths"].values() for method, one in methods.items()]
    sent = {p["name"].lower() for _, one in operations for p in one["parameters"] if p["in"] == "header"}
    replies = [reply for _, one in operations for reply in one["responses"].values()]
    read = {name.lower() for reply in replies for name in reply.get("headers", {})}

    assert {method.upper() for method, _ in operations} == set(allowed.allow_methods)
    assert sent <= {name.lower() for name in allowed.allow_headers}
    assert read <= {name.lower() for name in allowed.expose_headers}
