"""Writes the reference page of the HTTP operations from the OpenAPI document, which tests hold against the gateway."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast
from unittest.mock import Mock

from qinfer_api.app import Features, build_app
from qinfer_api.auth import Restrictions
from qinfer_api.rest.services import Services

HEAD = """
# HTTP operations

Every operation of the gateway's HTTP port, with its parameters, bodies and statuses: what `/openapi.json` of a running
gateway says. [HTTP](http-api.md) explains them.

An operation with a scope needs an [API key](http-api.md#api-keys) that has it, where the server asks for keys.

Errors are always `{"error": "<what happened, the value, what to do>"}`, an [ErrorBody](#errorbody).
"""
VERSION = "/versions/{version}"
SCHEMA_PREFIX = "#/components/schemas/"

Json = Mapping[str, Any]


def http_page(notice: str) -> str:
    """Returns the text of `http-operations.md`.

    Args:
        notice: The comment that says where the page comes from.
    """
    whole = document()
    tags: dict[str, list[str]] = {}
    for path, method, operation in _operations(whole):
        unversioned = path.replace(VERSION, "")
        if path != unversioned and unversioned in whole["paths"]:
            continue
        others = [other for other in whole["paths"] if other != path and other.replace(VERSION, "") == path]
        tags.setdefault(operation["tags"][0], []).extend(_operation(method, path, operation, others))
    lines = [notice + HEAD]
    for tag, text in tags.items():
        lines += [f"## {tag[0].upper()}{tag[1:]}\n", *text]
    lines.append("## Objects\n")
    for name, schema in sorted(whole["components"]["schemas"].items()):
        lines += [f"### {name}\n", f"{schema.get('description', '')}\n", *_object(schema)]
        lines += [f"One of {_type(schema)}.\n"] if "enum" in schema else []
    return "\n".join(lines)


def document() -> dict[str, Any]:
    """Returns the OpenAPI document; the routes need no services to describe themselves."""
    services = Mock(spec=Services, restrictions=Restrictions.for_http(()))
    return build_app(cast(Services, services), Features(Mock(), Mock(), Mock(), Mock(), Mock())).openapi()


def _operations(whole: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in whole["paths"].items():
        for method, operation in methods.items():
            yield path, method.upper(), operation


def _operation(method: str, path: str, operation: Json, others: list[str]) -> list[str]:
    lines = [f"### `{method} {path}`\n", f"**{operation['summary']}.** {operation.get('description', '')}\n"]
    lines += [f"Also `{method} {other}`, for one version.\n" for other in others]
    if parameters := [one for one in operation.get("parameters", []) if one["in"] != "path"]:
        lines += ["| parameter | in | type | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{one['name']}`{_star(one.get('required'))} | {one['in']} | {_type(one['schema'])} "
            f"| {_cell(one.get('description', ''))} |"
            for one in parameters
        ]
        lines.append("")
    if body := operation.get("requestBody"):
        lines += _body(body)
    lines += ["| status | meaning | body |", "|---|---|---|"]
    for status, response in sorted(operation["responses"].items()):
        lines.append(f"| {status} | {_cell(_meaning(response))} | {_cell(_content(response))} |")
    return [*lines, ""]


def _body(body: Json) -> list[str]:
    lines = []
    for kind, media in body["content"].items():
        schema = media.get("schema", {})
        lines.append(f"Body{'' if body.get('required') else ', which may be missing'}: `{kind}`, {_type(schema)}.\n")
        lines += _object(schema)
    return lines


def _object(schema: Json) -> list[str]:
    """Returns the table of an object's fields, those of objects within it by their paths."""
    rows = [f"| `{name}`{_star(must)} | {kind} | {_cell(meaning)} |" for name, must, kind, meaning in _fields(schema)]
    if not rows:
        return []
    table = ["| field | type | meaning |", "|---|---|---|", *rows, ""]
    if example := schema.get("example"):
        table += ["```json", json.dumps(example), "```\n"]
    return table


def _fields(schema: Json, within: str = "") -> Iterator[tuple[str, bool, str, str]]:
    """Yields path, whether it must be there, type, and meaning of the fields of an object."""
    for name, field in schema.get("properties", {}).items():
        path = f"{within}{name}"
        yield path, name in schema.get("required", ()), _type(field), field.get("description", "")
        inner = field.get("items", {}) if field.get("type") == "array" else field
        yield from _fields(inner, f"{path}[]." if inner is not field else f"{path}.")


def _type(schema: Json) -> str:
    """Returns the type of a value in a few words."""
    if reference := schema.get("$ref"):
        name = str(reference).removeprefix(SCHEMA_PREFIX)
        return f"[{name}](#{name.lower()})"
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_type(one) for one in schema[key]))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {_type(schema.get('items', {}))}"
    if isinstance(extra := schema.get("additionalProperties"), dict):
        return f"object of {_type(extra)}"
    kind = schema.get("type", "any")
    words: str = " or ".join(kind) if isinstance(kind, list) else str(kind)
    return words + _bounds(schema)


def _bounds(schema: Json) -> str:
    least: float | None = schema.get("minimum")
    most: float | None = schema.get("maximum")
    if least is not None and most is not None:
        return f", {least:,} to {most:,}"
    return f", {least:,} or more" if least is not None else f", {most:,} at most" if most is not None else ""


def _meaning(response: Json) -> str:
    headers = ", ".join(f"`{name}`" for name in response.get("headers", {}))
    return str(response["description"]) + (f" Headers: {headers}." if headers else "")


def _content(response: Json) -> str:
    return "; ".join(
        _type(media["schema"]) if kind == "application/json" and media.get("schema") else f"`{kind}`"
        for kind, media in response.get("content", {}).items()
    )


def _star(required: object) -> str:
    return " (required)" if required else ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
