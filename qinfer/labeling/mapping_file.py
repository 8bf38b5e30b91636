"""Mapping files: YAML or TOML → fields, as strict as people who type them need it.

In YAML every value is text, which the fields of a mapping make numbers of: labels such as `no`, `007` and `2026-01-31`
stay what they are. Keys that are there twice, tags and merge keys are refused: a few lines of those fill the memory.
"""

import tomllib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from qinfer.errors import SettingsError

MAX_FILE_BYTES = 4 * 2**20

_PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
_SHOWN = 60


def read_fields(path: Path) -> dict[str, Any]:
    """Reads the fields of one file, which are not checked yet.

    Raises:
        SettingsError: It can't be read, is too large, or has no fields.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"the mapping '{path}' can't be read: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise SettingsError(f"the mapping '{path}' is larger than {MAX_FILE_BYTES} bytes")
    try:
        fields = _parsed(data.decode("utf-8-sig"), path.suffix)
    except yaml.MarkedYAMLError as error:
        raise SettingsError(f"the mapping '{path}' can't be read: {_marked(error)}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"the mapping '{path}' can't be read: {error}") from None
    if not isinstance(fields, dict):
        raise SettingsError(f"the mapping '{path}' has no fields; it needs model and results")
    return fields


def explained(error: ValidationError) -> str:
    """Says in one line what pydantic found: field by field, with the value that is wrong, without its links."""
    found = error.errors(include_url=False, include_context=False)
    inner = {item["loc"][0] for item in found if len(item["loc"]) > 1}
    return "; ".join(
        f"field '{'.'.join(map(str, item['loc']))}': {_said(item['type'], item['msg'], item['input'])}"
        for item in found
        if not (item["type"] == "too_short" and item["loc"][0] in inner)  # as its only element is wrong
    )


class _Loader(yaml.BaseLoader):
    """Makes texts, lists and dictionaries."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: FBT001, FBT002  (PyYAML's)
        """Makes a node's value."""
        if node.tag not in _PLAIN:
            raise yaml.constructor.ConstructorError(None, None, f"the tag '{node.tag}' is not read", node.start_mark)
        if isinstance(node, yaml.ScalarNode) and node.style is None and node.value in {"", "~", "null"}:
            return None
        return super().construct_object(node, deep)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Makes a dictionary."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value == "<<" and key.style is None:
                raise yaml.constructor.ConstructorError(None, None, "merge keys (<<) are not read", key.start_mark)
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                what = f"'{key.value[:_SHOWN]}' is there twice"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def _parsed(text: str, suffix: str) -> Any:
    if suffix == ".toml":
        return tomllib.loads(text)
    return yaml.load(text, _Loader)  # noqa: S506  (it makes no objects)


def _marked(error: yaml.MarkedYAMLError) -> str:
    place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
    remedy = "; indent with spaces" if "'\\t'" in str(error.problem) else ""
    return f"{place}{error.problem}{remedy}"


def _said(kind: str, message: str, value: object) -> str:
    if kind == "extra_forbidden":
        return "there is no such field"
    if kind == "union_tag_not_found":
        return "it has no type, such as choices"
    message = message.removeprefix("Value error, ")
    shown = isinstance(value, str | int | float) or value is None
    if not shown or kind == "value_error":
        return message
    return f"{message}, not {'null' if value is None else repr(str(value)[:_SHOWN])}"
