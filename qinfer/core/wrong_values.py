"""Plain words for wrong values of settings and documents, in place of pydantic's texts and without possible secrets."""

import difflib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from qinfer.core.processes import PREFIX

_WHOLE, _NUMBER, _LIST, _MAPPING = "a whole number", "a number", "a list", "a mapping of names to values"
_EXPECTED: dict[str, str] = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "dict_type": _MAPPING,
    "mapping_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
}
_BOUNDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than": lambda of: f"more than {_plain(of['gt'])}",
    "greater_than_equal": lambda of: f"at least {_plain(of['ge'])}",
    "less_than": lambda of: f"less than {_plain(of['lt'])}",
    "less_than_equal": lambda of: f"at most {_plain(of['le'])}",
    "string_too_short": lambda of: f"at least {_format_count(of['min_length'], 'character', 'characters')}",
    "string_too_long": lambda of: f"at most {_format_count(of['max_length'], 'character', 'characters')}",
    "string_pattern_mismatch": lambda of: f"a text of the form {of['pattern']}",
    "too_short": lambda of: f"at least {_format_count(of['min_length'], 'entry', 'entries')}",
    "too_long": lambda of: f"at most {_format_count(of['max_length'], 'entry', 'entries')}",
    "literal_error": lambda of: str(of["expected"]),
    "enum": lambda of: str(of["expected"]),
}
_OTHERS = {"missing": "it is missing", "extra_forbidden": "there is no such field"}


def explain(problem: ErrorDetails) -> str:
    """Returns the fault: `expected at least 0`, `it is missing`, or qinfer's own text."""
    kind = problem["type"]
    if (text := _OTHERS.get(kind)) is not None:
        return text
    expected = _EXPECTED.get(kind)
    if expected is None and kind in _BOUNDS:
        expected = _BOUNDS[kind](problem.get("ctx", {}))
    if expected is not None:
        return f"expected {expected}"
    return problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")


def _plain(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _format_count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


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
