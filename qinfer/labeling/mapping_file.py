"""Mapping files: YAML or TOML → fields.

In YAML every value is text, which the fields of a mapping make numbers of: labels such as `no`, `007` and `2026-01-31`
stay what they are.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qinfer.core.documents import Unreadable, parse, read_limited
from qinfer.errors import SettingsError

MAX_FILE_BYTES = 4 * 2**20

_SHOWN = 60


def read_fields(path: Path) -> dict[str, Any]:
    """Reads the fields of one file, which are not checked yet.

    Raises:
        SettingsError: It can't be read, is too large, or has no fields.
    """
    try:
        fields = parse(read_limited(path, MAX_FILE_BYTES), path.suffix, is_typed=False)
    except OSError as error:
        raise SettingsError(f"the mapping '{path}' can't be read: {error.strerror}") from None
    except Unreadable as error:
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
