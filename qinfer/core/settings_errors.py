"""Messages about wrong settings, without possible secrets."""

import difflib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, get_origin

from pydantic import BaseModel, ValidationError

from qinfer.core.environments import PREFIX
from qinfer.core.wrong_values import explain

_OFF = ("false", "0", "no", "off", "f", "n")
_JSON_KINDS = {
    "dict": """an object is written as JSON, such as '{"name": {}}'""",
    "tuple": """a list is written as JSON, such as '["first", "second"]'""",
}


def wrong_values(error: ValidationError, settings: type[BaseModel]) -> list[str]:
    """Returns a message for each wrong variable."""
    return [
        f"{PREFIX}{'__'.join(str(part).upper() for part in each['loc'])}: {explain(each)}"
        f"{_got(each['loc'], each['input'], settings)}"
        for each in error.errors()
    ]


def unknown_names(names: Iterable[str], known: Collection[str], others: Collection[str]) -> list[str]:
    """Returns a message for each unknown variable."""
    sections = {name.partition("__")[0] for name in known}  # a section may be JSON: QINFER_HTTP={…}
    problems = []
    for name in sorted(names):
        upper = name.upper()
        if upper.startswith(PREFIX) and upper not in known and upper not in sections and upper not in others:
            nearest = difflib.get_close_matches(upper, known, n=1, cutoff=0.0)
            problems.append(f"unknown setting {name}; did you mean {nearest[0]}?")
    return problems


def is_lenient(environment: Mapping[str, str]) -> bool:
    """Tells whether unknown variables are allowed."""
    values = (value for name, value in environment.items() if name.upper() == f"{PREFIX}STRICT_SETTINGS")
    return any(value.strip().lower() in _OFF for value in values)


def not_json(environment: Mapping[str, str], settings: type[BaseModel]) -> list[str]:
    """Returns a message for each list or object that is not JSON; pydantic-settings names only the section."""
    wrong = []
    for section, field in settings.model_fields.items():
        for name, inner in getattr(field.annotation, "model_fields", {}).items():
            variable = f"{PREFIX}{section}__{name}".upper()
            kind = next((kind for kind in _JSON_KINDS if kind in str(inner.annotation)), "")
            if variable in environment and kind:
                try:
                    json.loads(environment[variable])
                except ValueError:
                    wrong.append(f"{variable}: {_JSON_KINDS[kind]}")
    return wrong


def _got(location: Sequence[int | str], value: object, settings: type[BaseModel]) -> str:
    """Lists and unknown fields may contain a secret."""
    annotation: object = settings
    for name in location:
        fields = getattr(annotation, "model_fields", {})
        annotation = fields[name].annotation if name in fields else None
    is_plain = annotation in {str, int, float, bool} or get_origin(annotation) is Literal
    return f", got {value!r}" if is_plain and not isinstance(value, dict | list) else ""
